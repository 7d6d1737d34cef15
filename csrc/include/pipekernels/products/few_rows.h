// Products of a few rows with a large matrix, as a decoder needs for each token.
//
// Such a product takes as long as reading the matrix. Each core reads it as one sequential stream,
// which the processor's prefetchers follow at the memory's full speed; kernels that walk through
// several rows of the matrix at a time reach a half to a third of it. From kMaxFewRows rows on,
// arithmetic takes longer, and such kernels are the faster ones.
#pragma once

#include <cstdint>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/isa.h"

namespace pipekernels {

constexpr int64_t kMaxFewRows = 4;

// out[r][i] = sum over j of x[r][j] * weight[i][j], plus bias[i] unless `bias` is null. All are
// contiguous: `x` is [rows, inner], `weight` [columns, inner], `out` [rows, columns]; none overlaps
// `out`. 16-bit floats are computed with in float32 and rounded once, to nearest even. A row's
// result depends neither on the other rows nor on the number of threads.
struct FewRows {
  void* out;
  const void* x;
  const void* weight;
  const void* bias;
  int64_t rows, columns, inner;
  DType dtype;
};

// Throws std::invalid_argument unless 1 <= rows <= kMaxFewRows and the dtype is a floating one.
void few_rows_product(const FewRows& product, int threads, Isa isa = best_isa());

// A product that is not rounded to `dtype`: `out` is [rows, columns] of partial_size_of(dtype), and
// there is no bias. `inner` is cut into `slabs` equal parts. The sum over each is computed as if it
// were alone, and these sums are added in a balanced binary tree: ((0 + 1) + (2 + 3)) + ... So one
// call for all slabs gives the bits of two calls for half of them each, with their results added.
// These bits may differ between values of `isa`, as those of few_rows_product() do. A NaN has all
// bits set.
//
// Throws std::invalid_argument as few_rows_product() does, and unless `slabs` is a power of two
// that divides `inner`.
void few_rows_partial_product(const FewRows& product, int64_t slabs, int threads,
                              Isa isa = best_isa());

}  // namespace pipekernels
