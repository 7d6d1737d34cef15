// The allocator of a rank's symmetric memory, which peers can read and write.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "pipekernels/shared_memory/free_list.h"
#include "pipekernels/shared_memory/segment.h"

namespace pipekernels {

// The free list is private to the owning rank. Pages of freed blocks stay allocated for later
// allocations, up to the recent peak use, so that a loop neither grows nor faults.
class SymmetricHeap {
 public:
  SymmetricHeap(std::shared_ptr<Segment> segment, int rank);

  // Returns a block aligned to 128 bytes; `bytes` may be 0. Throws std::runtime_error if there is
  // no room.
  std::byte* allocate(size_t bytes);
  void release(std::byte* block);

  bool contains(const void* data, size_t bytes) const;

  // Replaces the pages under `data` by private copies in this process, so that the peers and this
  // process no longer see each other's writes to them.
  void isolate(std::byte* data, size_t bytes);

 private:
  void trim();

  const std::shared_ptr<Segment> segment_;
  std::byte* const base_;
  const unsigned process_;

  std::mutex mutex_;
  FreeList free_list_;
  size_t kept_bytes_ = 0;  // Freed since the last trim and not allocated again.
  // Peak use in the current window of releases and in the previous one.
  size_t peak_ = 0;
  size_t last_peak_ = 0;
  int window_ = 0;
};

// Owns a block of a symmetric heap, and keeps the memory mapped.
class SymmetricBuffer {
 public:
  SymmetricBuffer(std::shared_ptr<SymmetricHeap> heap, size_t bytes)
      : heap_(std::move(heap)), data_(heap_->allocate(bytes)), bytes_(bytes) {}
  ~SymmetricBuffer() { heap_->release(data_); }
  SymmetricBuffer(const SymmetricBuffer&) = delete;
  SymmetricBuffer& operator=(const SymmetricBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<SymmetricHeap> heap_;
  std::byte* const data_;
  const size_t bytes_;
};

}  // namespace pipekernels
