// Who has which part of a block of memory: first fit over a free list.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <unordered_map>

namespace pipekernels {

// Knows offsets alone. Its user locks.
class FreeList {
 public:
  explicit FreeList(size_t capacity) : capacity_(capacity), free_{{0, capacity}} {}

  size_t capacity() const { return capacity_; }
  size_t used() const { return used_bytes_; }
  // Offset -> size; neighbours are merged.
  const std::map<size_t, size_t>& free() const { return free_; }

  // Aligned to 128 bytes; `bytes` may be 0. None if there is no room.
  std::optional<size_t> allocate(size_t bytes);
  // Returns the size of the part, which allocate() has rounded up.
  size_t release(size_t offset);

 private:
  const size_t capacity_;
  std::map<size_t, size_t> free_;
  std::unordered_map<size_t, size_t> parts_;
  size_t used_bytes_ = 0;
};

}  // namespace pipekernels
