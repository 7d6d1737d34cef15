// Conversions between floating-point types, vectorised for the CPU at hand.
//
// Every variant gives the same bits, those of Tensor.to() on a CPU: by way of float32, each step
// rounding to nearest even. Only NaNs may differ; they stay NaNs.
#pragma once

#include <cstddef>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/isa.h"

namespace pipekernels {

// destination[i] = source[i] for `count` elements. No pointer needs any alignment; the two do not
// overlap.
using CastKernel = void (*)(void* destination, const void* source, size_t count);

// Both dtypes are floating, and not the same: that would be a copy.
CastKernel cast_kernel(DType from, DType to, Isa isa = best_isa());

}  // namespace pipekernels
