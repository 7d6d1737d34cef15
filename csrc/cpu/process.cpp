#include "pipekernels/process.h"

#include <pthread.h>

#include <atomic>

namespace pipekernels {
namespace {

std::atomic<unsigned> generation{0};

}  // namespace

unsigned process_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace pipekernels
