// Products of a few rows with a large matrix, as a decoder needs for each token.
//
// Such a product takes as long as reading the matrix. Each core reads it as one sequential stream,
// which the processor's prefetchers follow, with help on some (prefetch_ahead() in isa.h); on
// others, kernels that walk through several rows at a time reach a half to a third of its speed.
// From kMaxSkinnyRows rows on, arithmetic takes longer, and such kernels are the faster ones.
#pragma once

#include <cstdint>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/isa.h"

namespace pipekernels {

constexpr int64_t kMaxSkinnyRows = 4;

// out[r][i] = sum over j of x[r][j] * weight[i][j], plus bias[i] unless `bias` is null. All are
// contiguous: `x` is [rows, inner], `weight` [columns, inner], or [inner, columns] if it is
// transposed, `out` [rows, columns]; none overlaps `out`. 16-bit floats are computed with in
// float32 and rounded once, to nearest even. A row's result depends neither on the other rows nor
// on the number of threads.
struct SkinnyGemm {
  void* out;
  const void* x;
  const void* weight;
  const void* bias;
  int64_t rows, columns, inner;
  DType dtype;
  bool transposed = false;
};

// Throws std::invalid_argument unless 1 <= rows <= kMaxSkinnyRows and the dtype is a floating one.
void skinny_gemm(const SkinnyGemm& product, int threads, Isa isa = best_isa());

// A product that is not rounded to `dtype`: `out` is [rows, columns] of partial_size_of(dtype), and
// there is no bias and no transposed weight. `inner` is cut into `slabs` equal parts. The sum over
// each is computed as if it were alone, and these sums are added in a balanced binary tree: ((0 +
// 1) + (2 + 3)) + ... So one call for all slabs gives the bits of two calls for half of them each,
// with their results added. These bits may differ between values of `isa`, as those of
// skinny_gemm() do. A NaN has all bits set.
//
// Throws std::invalid_argument as skinny_gemm() does, and unless `slabs` is a power of two
// that divides `inner`.
void skinny_gemm_partial(const SkinnyGemm& product, int64_t slabs, int threads,
                         Isa isa = best_isa());

}  // namespace pipekernels
