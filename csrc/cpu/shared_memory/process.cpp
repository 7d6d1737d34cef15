#include "pipekernels/shared_memory/process.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>

namespace pipekernels {
namespace {

// The number of the system call pidfd_open, the same on all architectures. Kernel headers before
// Linux 5.3 do not define it, and a Python built with them has no os.pidfd_open.
constexpr long kPidfdOpen = 434;

std::atomic<unsigned> generation{0};

}  // namespace

unsigned process_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

int open_pidfd(int pid) {
  const long fd = syscall(kPidfdOpen, pid, 0);
  if (fd >= 0) return static_cast<int>(fd);
  const char* remedy = errno == ENOSYS ? " (it takes Linux 5.3 or newer)" : "";
  throw std::system_error(errno, std::generic_category(),
                          "cannot watch process " + std::to_string(pid) + remedy);
}

}  // namespace pipekernels
