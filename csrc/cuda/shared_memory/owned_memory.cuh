// A rank's device memory; freed when nobody has it mapped.
#pragma once

#include <cstddef>
#include <memory>

#include "pipekernels/shared_memory/segment.h"

namespace pipekernels {

class DeviceMemory {
 public:
  // `owners`: the ranks that may have it mapped, if they are processes; else null. Throws
  // std::runtime_error if there is no room.
  DeviceMemory(int device, size_t bytes, std::shared_ptr<Segment> owners, int rank);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* base() const { return base_; }
  bool is_mapped() const;

 private:
  const int device_;
  const unsigned process_;
  const std::shared_ptr<Segment> owners_;
  const int rank_;
  std::byte* base_ = nullptr;
};

}  // namespace pipekernels
