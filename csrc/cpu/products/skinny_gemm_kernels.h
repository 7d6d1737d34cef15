// What skinny_gemm.cpp calls of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipekernels/products/skinny_gemm.h"

namespace pipekernels {

// Columns begin to end - 1 of a product. Partial ones have slabs and no bias, and `out` is of
// accumulators.
struct SkinnyGemmPiece {
  void* out;
  const void* widened;
  const void* weight;
  const void* bias;
  int64_t columns, inner, slabs, begin, end;
};

struct SkinnyGemmKernels {
  size_t (*widened_bytes)(int64_t inner);  // of one row
  void (*widen)(void* widened, const void* x, int64_t rows, int64_t inner);
  void (*products[kMaxSkinnyRows])(const SkinnyGemmPiece& piece);  // of 1, 2, ... rows
  void (*partial_products[kMaxSkinnyRows])(const SkinnyGemmPiece& piece);
};

}  // namespace pipekernels
