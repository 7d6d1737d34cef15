#include "pipekernels/shared_memory/free_list.h"

#include <algorithm>
#include <iterator>

namespace pipekernels {
namespace {

constexpr size_t kAlignment = 128;

}  // namespace

std::optional<size_t> FreeList::allocate(size_t bytes) {
  if (bytes > capacity_) return std::nullopt;  // Rounding up could overflow.
  const size_t size = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  const auto part = std::find_if(free_.begin(), free_.end(),
                                 [size](const auto& entry) { return entry.second >= size; });
  if (part == free_.end()) return std::nullopt;
  const auto [offset, available] = *part;
  free_.erase(part);
  if (available > size) free_[offset + size] = available - size;
  allocated_[offset] = size;
  used_bytes_ += size;
  return offset;
}

size_t FreeList::release(size_t offset) {
  const auto part = allocated_.find(offset);
  const size_t released = part->second;
  allocated_.erase(part);
  used_bytes_ -= released;

  size_t size = released;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      free_.erase(previous);
    }
  }
  free_[offset] = size;
  return released;
}

}  // namespace pipekernels
