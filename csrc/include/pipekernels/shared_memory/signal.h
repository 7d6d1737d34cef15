// A counter in shared memory that one rank raises, or several ring, and that ranks wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "pipekernels/host/fuzz.h"

namespace pipekernels {

// Zeroed memory is a valid initial state. Values wrap around; two values that are compared are less
// than 2^31 apart. Must not share a cache line with data that other ranks write.
class Signal {
 public:
  // For the owner, the only rank that raises the signal.
  uint32_t own_value() const { return value_.load(std::memory_order_relaxed); }

  // Acquires: if true, everything that the owner wrote before raise(target) is visible.
  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value_.load(std::memory_order_acquire) - target) >= 0;
  }

  // Sequentially consistent, as are the accesses in sleep(): either the owner sees the sleeper and
  // wakes it, or the sleeper sees the new value and does not sleep.
  void raise(uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    fuzz_delay();
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake();
  }

  // As raise() of the next value, for a signal that several ranks ring. Who waits for the next ring
  // reads value() first, then looks for what the ring announces, and then sleeps.
  void ring() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    fuzz_delay();
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake();
  }
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Wakes all sleepers without changing the value, so that they check for failures.
  void wake();

  // Sleeps until the signal may have reached `target`, for at most `limit`. May return early.
  void sleep(uint32_t target, std::chrono::milliseconds limit);

 private:
  std::atomic<uint32_t> value_;
  std::atomic<uint32_t> sleepers_;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics must work between processes");

// Hints to the core that this is a spin loop.
inline void relax() {
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Prefetches the cache line at `address` in exclusive state, for a write to come.
inline void prefetch_for_write(const void* address) {
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  // Compilers emit prefetchw only for newer target processors; older processors ignore it.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

}  // namespace pipekernels
