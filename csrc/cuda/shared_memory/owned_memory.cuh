// A rank's device memory.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "host/runtime.cuh"
#include "pipekernels/shared_memory/device_memory.h"
#include "pipekernels/shared_memory/segment.h"

namespace pipekernels {

// The destructor frees the memory, unless other processes still have it mapped: then it is freed
// when this process constructs its next DeviceMemory, or ends.
class DeviceMemory {
 public:
  // `mappers`: the segment of the ranks that map the memory if they are processes, else null.
  // Throws std::runtime_error if there is no room.
  DeviceMemory(int device, size_t bytes, std::shared_ptr<Segment> mappers, int rank);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* base() const { return base_; }
  bool is_mapped() const;  // By other processes.

 private:
  const int device_;
  const unsigned process_;
  const std::shared_ptr<Segment> mappers_;
  const int rank_;
  std::byte* base_ = nullptr;
};

// A rank's memory, and its mappings of the peers' memory. The communicators that were split off its
// own share it.
struct MappedMemory {
  MappedMemory(int device, std::shared_ptr<Segment> segment, int rank);
  // Unmaps the peers' memory.
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  // The address of memory of a peer that is a thread, or a process. Throw std::runtime_error if
  // this rank's device, which is to be the current one, cannot access it.
  std::byte* adopt(std::shared_ptr<DeviceMemory> memory);
  std::byte* open(int peer, const cudaIpcMemHandle_t& handle);
  // Maps growth `i` of the heap of `peer` at the first call. Returns its address, or null if it
  // cannot be mapped.
  std::byte* growth(int peer, int i, bool is_threads);

  const int device;
  const unsigned process;
  const std::shared_ptr<Segment> segment;
  const int rank;
  std::shared_ptr<DeviceMemory> own;
  std::vector<std::shared_ptr<DeviceMemory>> of_threads;  // The peers' if they are threads.
  std::vector<void*> opened;                              // The mappings if they are processes.
  std::byte* bases[kMaxDeviceRanks] = {};                 // By rank.

 private:
  std::mutex mutex_;  // Communicators that were split off map growths as well.
  std::byte* growths_[kMaxDeviceRanks][kGrowths] = {};
};

}  // namespace pipekernels
