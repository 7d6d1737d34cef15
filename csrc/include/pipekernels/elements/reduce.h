// Elementwise reductions in a fixed order, vectorised for the CPU at hand.
//
// Every variant gives the same bits: elements are combined in the order of the sources, 16-bit
// floats in float32 and rounded once at the end (to nearest even), integers modulo 2^bits, an
// average is the sum divided by the number of terms before that rounding, and a maximum or minimum
// is NaN where a term is. A sum or average that is NaN has all bits set.
#pragma once

#include <cstddef>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/isa.h"

namespace pipekernels {

// No pointer needs any alignment. A destination may be one of the sources, but not overlap it
// otherwise.
struct ReduceKernels {
  // destination[i] = reduction of sources[0][i], ..., sources[terms - 1][i].
  void (*reduce)(void* destination, const void* const* sources, int terms, size_t count);
  // The same in place of each of the tensors, of which all but tensors[own] are expected in other
  // cores' caches.
  void (*reduce_in_place)(void* const* tensors, int terms, int own, size_t count);
  // destination[i] = partial[i] combined with source[i]: a step of a chain, not yet rounded. The
  // partials have partial_size_of(dtype) bytes per element; null `partial` starts the chain.
  void (*accumulate)(void* destination, const void* partial, const void* source, size_t count);
  // The last of `terms` steps of a chain: rounds to the element type.
  void (*finish)(void* destination, const void* partial, const void* source, int terms,
                 size_t count);
};

// The dtype and reduction are ones that check_reducible() accepts.
const ReduceKernels& reduce_kernels(DType dtype, Reduction reduction, Isa isa = best_isa());

// Throws std::invalid_argument unless there are kernels for it.
void check_reducible(DType dtype, Reduction reduction);

}  // namespace pipekernels
