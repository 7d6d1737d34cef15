// A first-fit allocator of ranges of offsets.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <unordered_map>

namespace pipekernels {

// Not thread-safe; the caller locks.
class FreeList {
 public:
  explicit FreeList(size_t capacity) : capacity_(capacity), free_{{0, capacity}} {}

  size_t capacity() const { return capacity_; }
  size_t used() const { return used_bytes_; }
  // The free ranges, offset -> size; adjacent ones are merged.
  const std::map<size_t, size_t>& free() const { return free_; }

  // Returns an offset aligned to 128 bytes, or nothing if there is no room. `bytes` may be 0.
  std::optional<size_t> allocate(size_t bytes);
  // Frees the range at `offset` and returns its size, which allocate() has rounded up.
  size_t release(size_t offset);

 private:
  const size_t capacity_;
  std::map<size_t, size_t> free_;
  std::unordered_map<size_t, size_t> allocated_;  // Offset -> size.
  size_t used_bytes_ = 0;
};

}  // namespace pipekernels
