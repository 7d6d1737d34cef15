// How a tensor is divided among ranks, and a rank's slice into blocks.
#pragma once

#include <algorithm>
#include <cstddef>

namespace pipekernels {

// A range of elements.
struct Range {
  size_t begin;
  size_t count;
};

// `count` elements in `parts` slices of `stride` (the last ones may be shorter or empty), and every
// slice in blocks of `block`.
struct Slices {
  size_t count;
  size_t stride;
  size_t block;

  // Slices that start on cache lines if the first does.
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
