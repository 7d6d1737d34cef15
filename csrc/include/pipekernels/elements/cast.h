// Conversions between floating-point types, vectorised for this machine's CPU.
//
// Every instruction-set variant produces the bits of Tensor.to() on a CPU: values are converted
// through float32, and each step rounds to nearest even. NaNs stay NaNs, but their payloads may
// differ.
#pragma once

#include <cstddef>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/isa.h"

namespace pipekernels {

// destination[i] = source[i] for `count` elements. The pointers need no alignment. The buffers must
// not overlap.
using CastKernel = void (*)(void* destination, const void* source, size_t count);

// `from` and `to` must be different floating-point dtypes.
CastKernel cast_kernel(DType from, DType to, Isa isa = best_isa());

}  // namespace pipekernels
