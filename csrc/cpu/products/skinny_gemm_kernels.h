// What skinny_gemm.cpp calls of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipekernels/products/skinny_gemm.h"

namespace pipekernels {

// Columns begin to end - 1 of a product; `out` has the address of each of its rows. Partial ones
// have slabs and no bias, and their results are accumulators. With a transposed
// weight, `widened` has the rows of x as they are.
struct SkinnyGemmPiece {
  void* out[kMaxSkinnyRows];
  const void* widened;
  const void* weight;
  const void* bias;
  int64_t columns, inner, slabs, begin, end;
  int64_t ahead;  // Bytes of the weight: prefetch_ahead().
};

struct SkinnyGemmKernels {
  size_t (*widened_bytes)(int64_t inner);  // of one row
  void (*widen)(void* widened, const void* x, int64_t rows, int64_t inner);
  void (*products[kMaxSkinnyRows])(const SkinnyGemmPiece& piece);  // of 1, 2, ... rows
  void (*partial_products[kMaxSkinnyRows])(const SkinnyGemmPiece& piece);
  void (*transposed_products[kMaxSkinnyRows])(const SkinnyGemmPiece& piece);
};

// Pieces of products with a transposed weight begin at multiples of so many columns.
constexpr int64_t kTransposedColumns = 512;

const SkinnyGemmKernels& skinny_gemm_kernels(DType dtype, Isa isa);

// Memory that a thread keeps between calls. Vectors that straddle cache lines would take twice as
// long to load.
void* kept_cache_lines(size_t bytes);

// So many rows of the weight make pieces that are worth a thread's while.
int64_t columns_per_piece(int64_t row_bytes);

}  // namespace pipekernels
