// Devices simulated by CPU threads, one for every thread of every block of every rank.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "pipekernels/collectives/block_collective.h"
#include "pipekernels/host/fuzz.h"

namespace pipekernels {

// Called between polls: yields first, then sleeps, since there are more threads than cores.
inline void rest(int polls) {
  if (polls < 10) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// A reusable barrier of a fixed number of threads.
class ThreadBarrier {
 public:
  explicit ThreadBarrier(int threads) : threads_(threads) {}

  void arrive() {
    const unsigned turn = turn_.load();
    if (arrived_.fetch_add(1) + 1 == threads_) {
      arrived_.store(0);
      turn_.store(turn + 1);
    } else {
      for (int polls = 0; turn_.load() == turn; ++polls) rest(polls);
    }
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> turn_{0};
};

struct CpuBlock {
  explicit CpuBlock(int threads) : barrier(threads) {}
  ThreadBarrier barrier;
  std::atomic<bool> votes[3] = {};
  DeviceScratch scratch;
};

class CpuTeam {
 public:
  CpuTeam(CpuBlock& shared, int block, int thread, int threads)
      : shared_(shared), block_(block), thread_(thread), threads_(threads) {}

  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int block() const { return block_; }
  DeviceScratch& shared() const { return shared_.scratch; }

  void sync() {
    fuzz_delay();
    shared_.barrier.arrive();
  }
  // Three flags are used in turn. Each call clears the next one, which no thread can access then.
  bool any(bool value) {
    if (value) shared_.votes[turn_ % 3] = true;
    if (thread_ == 0) shared_.votes[(turn_ + 1) % 3] = false;
    sync();
    return shared_.votes[turn_++ % 3];
  }

  template <class T>
  T load_acquire(const T* word) const {
    fuzz_delay();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
  }
  template <class T>
  T load_relaxed(const T* word) const {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
  }
  void store_release(uint64_t* word, uint64_t value) const {
    fuzz_delay();
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }
  void store_relaxed(uint64_t* word, uint64_t value) const {
    fuzz_delay();
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }
  uint64_t exchange(uint64_t* word, uint64_t value) const {
    return __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
  }
  // ThreadSanitizer does not know fences.
  void fence() const { ++fences; }
  static inline std::atomic<int> fences{0};

  uint64_t now() const {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void pause() const { rest(10); }

 private:
  CpuBlock& shared_;
  const int block_, thread_, threads_;
  unsigned turn_ = 0;
};

// The device memory of all ranks.
class CpuDevices {
 public:
  CpuDevices(const DeviceLayout& layout, size_t heap_bytes, double timeout = 60) : layout_(layout) {
    const size_t bytes = (layout.heap() + heap_bytes + 127) / 128 * 128;
    for (int rank = 0; rank < layout.ranks; ++rank) {
      memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(128, bytes)));
      std::memset(memory_[rank].get(), 0, layout.control_bytes());
      flags_.push_back(std::make_unique<HostFlags>());
    }
    used_.resize(layout.ranks, layout.heap());
    timeout_ = static_cast<uint64_t>(timeout * 1e9);
  }

  const DeviceLayout& layout() const { return layout_; }
  HostFlags& flags(int rank) { return *flags_[rank]; }

  DeviceRanks seen_by(int rank) {
    DeviceRanks ranks{};
    ranks.layout = layout_;
    ranks.rank = rank;
    ranks.timeout = timeout_;
    ranks.host = flags_[rank].get();
    for (int peer = 0; peer < layout_.ranks; ++peer) {
      ranks.memory[peer] = ranks.heap[0][peer] = memory_[peer].get();
    }
    return ranks;
  }

  // Allocates symmetric memory of `rank`, and returns its offset in the rank's memory.
  uint64_t allocate(int rank, size_t bytes) {
    const uint64_t location = used_[rank];
    used_[rank] += (bytes + 127) / 128 * 128;
    return location;
  }
  std::byte* at(int rank, uint64_t location) { return memory_[rank].get() + location; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const DeviceLayout layout_;
  uint64_t timeout_;
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  std::vector<std::unique_ptr<HostFlags>> flags_;
  std::vector<size_t> used_;
};

struct CpuLaunch {
  DeviceLaunch launch;
  std::function<void(CpuTeam&, const DeviceLaunch&)> kernel;
};

// Runs the launches of one rank's stream, one after the other.
inline void run_stream(const std::vector<CpuLaunch>& launches, int blocks, int threads_per_block) {
  std::vector<std::unique_ptr<CpuBlock>> shared;
  for (int b = 0; b < blocks; ++b) shared.push_back(std::make_unique<CpuBlock>(threads_per_block));
  ThreadBarrier end(blocks * threads_per_block);
  std::vector<std::thread> threads;
  for (int b = 0; b < blocks; ++b) {
    for (int t = 0; t < threads_per_block; ++t) {
      threads.emplace_back([&, b, t] {
        CpuTeam team(*shared[b], b, t, threads_per_block);
        for (const CpuLaunch& each : launches) {
          CHECK(each.launch.blocks <= blocks);
          if (b < each.launch.blocks) each.kernel(team, each.launch);
          end.arrive();
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

// Runs the streams of all ranks concurrently.
inline void run_streams(const std::vector<std::vector<CpuLaunch>>& streams, int blocks,
                        int threads_per_block) {
  std::vector<std::thread> ranks;
  for (const auto& stream : streams) {
    ranks.emplace_back([&] { run_stream(stream, blocks, threads_per_block); });
  }
  for (auto& rank : ranks) rank.join();
}

}  // namespace pipekernels
