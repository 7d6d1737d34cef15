// What integer_product.cpp calls of each instruction set.
#pragma once

#include <cstdint>

#include "pipekernels/products/integer_product.h"

namespace pipekernels {

// A matrix register holds kIntegerSpan elements of kIntegerRows rows; the rows after the last one
// are read, but not used. kMostIntegerRows, a multiple of kIntegerRows, is the most rows of a
// piece.
constexpr int64_t kIntegerSpan = 64, kIntegerRows = 16, kMostIntegerRows = 256;

// How rows of `inner` elements are rounded: `blocks` scales, for `block` elements each. `bytes` are
// those of a row, a multiple of kIntegerSpan; what exceeds `inner` is 0.
struct RoundedShape {
  int64_t inner, block, blocks, bytes;
};

// Rows as a product takes them: values [rows][bytes], scales and sums [rows][blocks].
struct RoundedRows {
  int8_t* values;
  float* scales;
  int32_t* sums;  // of the values of a block
};

// One tile of columns, for `rows` rows.
struct IntegerPiece {
  RoundedShape shape;
  RoundedRows x;
  const uint8_t* values;  // of the tile, as the next two
  const void* scales;
  const uint8_t* zeros;
  const void* bias;  // of the tile's columns
  void* const* out;  // of each row, at the tile's first column
  int64_t rows, blocks_per_group;
  int64_t columns;  // of the tile: up to 16
  int64_t ahead;    // Bytes: prefetch_ahead().
  DType dtype, scale_dtype;
};

struct IntegerKernels {
  // Rounds one row; `to` is that row's.
  void (*round)(const RoundedShape& shape, const RoundedRows& to, const void* x, DType dtype);
  void (*product8)(const IntegerPiece& piece);
  void (*product4)(const IntegerPiece& piece);
};

}  // namespace pipekernels
