// The operands of products: contiguous CPU tensors, of which those given as null are absent. Each
// function returns false unless shapes and dtypes fit.
#pragma once

#include "pipekernels/host/dlpack.h"
#include "pipekernels/products/expert_product.h"
#include "pipekernels/products/skinny_gemm.h"

namespace pipekernels::python {

// Reads `product` but for its bias. `out` has the dtype of `x` and `weight`, or, if `partial`, that
// in which sums are taken.
bool read_product(const dlpack::Tensor& out, const dlpack::Tensor& x, const dlpack::Tensor& weight,
                  bool partial, SkinnyGemm& product);

bool read_bias(const dlpack::Tensor& bias, SkinnyGemm& product);

struct ExpertOperands {
  const dlpack::Tensor *out, *x, *weight, *bias, *chosen, *scale;
};

// The weight is of int8 if there is a scale; then without `chosen` it is one matrix for a few rows.
bool read_experts(const ExpertOperands& operands, ExpertProduct& product);

}  // namespace pipekernels::python
