// Products of rows with one matrix each out of several, as a mixture of experts computes for a few
// tokens: of the experts' weights, only those that are chosen are read.
#pragma once

#include <cstdint>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/isa.h"

namespace pipekernels {

// out[p][i] = sum over j of x[p * rows / pairs][j] * weight[chosen[p]][i][j], plus
// bias[chosen[p]][i] unless `bias` is null. All are contiguous: `x` is [rows, inner], `weight`
// [experts, columns, inner], `bias` [experts, columns], `out` [pairs, columns]; none overlaps
// `out`. Every row of `x` has as many pairs, which follow each other. A pair has the bits of
// skinny_gemm().
struct ExpertProduct {
  void* out;
  const void* x;
  const void* weight;
  const void* bias;
  const int64_t* chosen;
  int64_t pairs, rows, experts, columns, inner;
  DType dtype;
};

// Throws std::invalid_argument unless the dtype is a floating one, `rows` divides `pairs`, and all
// of `chosen` are in 0..experts - 1.
void expert_product(const ExpertProduct& product, int threads, Isa isa = best_isa());

}  // namespace pipekernels
