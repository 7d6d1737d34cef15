// What integer_product.cpp calls of each instruction set.
#pragma once

#include <cstdint>

#include "pipekernels/products/integer_product.h"

namespace pipekernels {

// Rows as a product takes them: values [rows][blocks][32], scales and sums [rows][blocks].
struct RoundedRows {
  int8_t* values;
  float* scales;
  int32_t* sums;  // of the values of a block
};

// One tile of columns, for `rows` rows.
struct IntegerPiece {
  RoundedRows x;
  const uint8_t* values;  // of the tile, as the next two
  const void* scales;
  const uint8_t* zeros;
  const void* bias;  // of the tile's columns
  void* const* out;  // of each row, at the tile's first column
  int64_t rows, blocks, blocks_per_group;
  int64_t columns;  // of the tile: up to 16
  int64_t ahead;    // Bytes: prefetch_ahead().
  DType dtype, scale_dtype;
};

struct IntegerKernels {
  // Rounds one row of `inner` elements; `to` is that row's.
  void (*round)(const RoundedRows& to, const void* x, int64_t inner, DType dtype);
  void (*product8)(const IntegerPiece& piece);
  void (*product4)(const IntegerPiece& piece);
};

}  // namespace pipekernels
