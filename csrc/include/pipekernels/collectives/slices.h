// Divides a tensor into slices, one per rank, and each slice into blocks.
#pragma once

#include <algorithm>
#include <cstddef>

namespace pipekernels {

// A range of elements.
struct Range {
  size_t begin;
  size_t count;
};

// Part `part` of `parts` of a range, which differ by 64 elements at most.
inline Range part_of(const Range& whole, int part, int parts) {
  const size_t stride = ((whole.count + parts - 1) / parts + 63) / 64 * 64;
  const size_t skipped = std::min(whole.count, part * stride);
  return {whole.begin + skipped, std::min(whole.count - skipped, stride)};
}

// `count` elements in slices of `stride` elements (the last ones may be shorter or empty), each in
// blocks of `block` elements.
struct Slices {
  size_t count;
  size_t stride;
  size_t block;

  // `parts` slices, all aligned to cache lines if the first is.
  static Slices even(size_t count, int parts, size_t element_size, size_t block) {
    const size_t line = 64 / std::min<size_t>(64, element_size);
    const size_t stride = (count + parts - 1) / parts;
    return {count, (stride + line - 1) / line * line, block};
  }

  size_t blocks() const { return (std::min(count, stride) + block - 1) / block; }
  Range slice(int part) const {
    const size_t begin = std::min(count, part * stride);
    return {begin, std::min(count - begin, stride)};
  }
  Range operator()(int part, size_t index) const {
    const Range whole = slice(part);
    const size_t skipped = std::min(whole.count, index * block);
    return {whole.begin + skipped, std::min(whole.count - skipped, block)};
  }
};

}  // namespace pipekernels
