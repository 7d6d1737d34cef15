#include "pipekernels/shared_memory/signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace pipekernels {

void Signal::wake() { syscall(SYS_futex, &value_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void Signal::sleep(uint32_t target, std::chrono::milliseconds limit) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = value_.load(std::memory_order_seq_cst);
  if (static_cast<int32_t>(seen - target) < 0) {
    fuzz_delay();
    const timespec timeout = {limit.count() / 1000, limit.count() % 1000 * 1000000};
    // Returns at once if the value is no longer `seen`.
    syscall(SYS_futex, &value_, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace pipekernels
