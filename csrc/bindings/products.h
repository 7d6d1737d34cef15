// The operands of products: contiguous CPU tensors, of which those given as null are absent. Each
// function returns false unless shapes and dtypes fit.
#pragma once

#include "pipekernels/host/dlpack.h"
#include "pipekernels/products/expert_product.h"
#include "pipekernels/products/integer_product.h"
#include "pipekernels/products/skinny_gemm.h"

namespace pipekernels::python {

// Reads `product` but for its bias. `out` has the dtype of `x` and `weight`, or, if `partial`, that
// in which sums are taken.
bool read_product(const dlpack::Tensor& out, const dlpack::Tensor& x, const dlpack::Tensor& weight,
                  bool partial, SkinnyGemm& product);

bool read_bias(const dlpack::Tensor& bias, SkinnyGemm& product);

struct ExpertOperands {
  const dlpack::Tensor *out, *x, *weight, *bias, *chosen;
};

bool read_experts(const ExpertOperands& operands, ExpertProduct& product);

// `values` are uint8, [tiles, blocks, 512 or 256], and `scales` and `zeros` [tiles, groups, 16], as
// IntegerMatrix has them; with `chosen`, which is int64, all have experts as their first dimension.
struct IntegerOperands {
  const dlpack::Tensor *out, *x, *values, *scales, *zeros, *bias, *chosen;
};

struct IntegerCall {
  IntegerProduct product;
  IntegerMatrix matrix;
  const int64_t* chosen;  // null: one matrix
  int64_t pairs, experts;

  void run(int threads, IntegerIsa isa = best_integer_isa()) const;
};

bool read_integers(const IntegerOperands& operands, IntegerCall& call);

}  // namespace pipekernels::python
