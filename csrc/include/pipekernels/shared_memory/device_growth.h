// How the ranks learn that one's symmetric memory on its device has grown.
//
// To allocate is not a collective, so a rank grows its memory alone and publishes a handle. Its
// peers map it before their next launch, and say from which launch on their kernels can access it.
// In launches before that, which a rank can be about to make when its peer is already further, the
// data are copied through the staging, as data outside symmetric memory are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pipekernels {

constexpr int kGrowths = 4;          // Per rank.
constexpr int kMaxDeviceRanks = 32;  // A kernel's parameters hold 2 + kGrowths addresses per rank.

// In the memory that the ranks share; written by one rank alone.
struct alignas(128) DeviceGrowth {
  // The rank's growths so far, and of each a cudaIpcMemHandle_t if the ranks are processes, else
  // the address of a std::shared_ptr<DeviceMemory>.
  std::atomic<int32_t> count;
  alignas(8) std::byte handles[kGrowths][64];
  // known_from[peer][i]: one more than the number of the rank's first launch that can access growth
  // i of `peer`; 0 while none can.
  std::atomic<uint64_t> known_from[kMaxDeviceRanks][kGrowths];

  void forget() {
    for (auto& of_peer : known_from) {
      for (auto& launch : of_peer) launch.store(0, std::memory_order_relaxed);
    }
  }
};

}  // namespace pipekernels
