// Random delays where ranks synchronise, for the tests of the protocol. No code in other builds.
#pragma once

#ifdef PIPEKERNELS_FUZZ_DELAYS
#include <sched.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#endif

namespace pipekernels {

#ifdef PIPEKERNELS_FUZZ_DELAYS

// One in this many calls of fuzz_delay() sleeps, and another one yields the core. 0: neither.
inline std::atomic<unsigned> fuzz_one_in{0};

inline void fuzz_delay() {
  const unsigned one_in = fuzz_one_in.load(std::memory_order_relaxed);
  if (one_in == 0) return;
  thread_local std::minstd_rand random(std::random_device{}());
  const unsigned drawn = random() % one_in;
  if (drawn == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  if (drawn == 1) sched_yield();
}

#else

inline void fuzz_delay() {}

#endif

}  // namespace pipekernels
