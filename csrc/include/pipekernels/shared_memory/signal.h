// A counter in shared memory that one rank raises and other ranks wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "pipekernels/host/fuzz.h"

namespace pipekernels {

// Zeroed memory is a valid initial state. Values wrap around; two values that are compared are less
// than 2^31 apart. Should have a cache line without what other ranks write.
class Signal {
 public:
  // The value that only the owner, who raises it, may rely on.
  uint32_t own_value() const { return value_.load(std::memory_order_relaxed); }

  // What the owner wrote to shared memory before raising the signal is visible to whoever sees it
  // raised.
  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value_.load(std::memory_order_acquire) - target) >= 0;
  }

  // Sequentially consistent, as in sleep(): either the owner sees the sleeper and wakes it, or the
  // sleeper sees the new value and does not sleep.
  void raise(uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    fuzz_delay();
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake();
  }

  // Wakes all who sleep, with the value as it is, so that they look around.
  void wake();

  // Sleeps until the signal may have reached `target`, at most for `limit`; may return early.
  void sleep(uint32_t target, std::chrono::milliseconds limit);

 private:
  std::atomic<uint32_t> value_;
  std::atomic<uint32_t> sleepers_;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics must work between processes");

// Tells the core that this is a spin loop.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Asks for the cache line at `address`, which this core is going to write while others may have it.
inline void take_line(const void* address) {
#if defined(__x86_64__)
  // Which the compiler gives to those alone who build for newer processors; older ones ignore it.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

}  // namespace pipekernels
