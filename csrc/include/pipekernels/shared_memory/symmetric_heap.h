// Memory that peers can read and write, handed out by the rank that owns it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "pipekernels/shared_memory/free_list.h"
#include "pipekernels/shared_memory/segment.h"

namespace pipekernels {

// Only the owner knows its free list. Pages of freed blocks are kept for the
// next allocations, up to the largest use of late, so that a loop neither grows nor faults.
class SymmetricHeap {
 public:
  SymmetricHeap(std::shared_ptr<Segment> segment, int rank);

  // Aligned to 128 bytes; `bytes` may be 0. Throws std::runtime_error if the heap is full.
  std::byte* allocate(size_t bytes);
  void release(std::byte* block);

  bool contains(const void* data, size_t bytes) const;

  // Makes the pages under `data` this process's own, contents and all: peers write elsewhere.
  void isolate(std::byte* data, size_t bytes);

 private:
  void trim();

  const std::shared_ptr<Segment> segment_;
  std::byte* const base_;
  const unsigned process_;

  std::mutex mutex_;
  FreeList parts_;
  size_t kept_bytes_ = 0;  // Freed since the last trim and not handed out again.
  // The largest use in this window of releases and in the one before.
  size_t peak_ = 0;
  size_t last_peak_ = 0;
  int window_ = 0;
};

// A block that is released with this object; it keeps the memory mapped meanwhile.
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
