// Elementwise reductions in a fixed order, vectorised for this machine's CPU.
//
// Every instruction-set variant produces the same bits. Elements are combined in the order of the
// sources, or in tree order (tree_order.h) for kTreeSum and kTreeAvg. 16-bit floats are reduced in
// float32 and rounded once at the end, to nearest even. Integers wrap around modulo 2^bits. An
// average is the sum divided by the number of terms before that rounding. A maximum or minimum is
// NaN if a term is. A sum, average or product that is NaN has all bits set. Complex numbers are
// summed as pairs of real ones. Of bools, a sum is "or" and a product "and".
#pragma once

#include <cstddef>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/isa.h"

namespace pipekernels {

// The pointers need no alignment. A destination may equal a source; otherwise they must not
// overlap.
struct ReduceKernels {
  // destination[i] = reduction of sources[0][i], ..., sources[terms - 1][i].
  void (*reduce)(void* destination, const void* const* sources, int terms, size_t count);
  // The same, with the result stored to every tensor. All but tensors[own] are expected to be in
  // the caches of other cores.
  void (*reduce_in_place)(void* const* tensors, int terms, int own, size_t count);
  // A step of a chain, in which term `index` is added to the partial results of the terms before:
  // one, of all of them, or in tree order those on the stack, bottom first, `stride` elements
  // apart. `destination` and `partials` have partial_size_of(dtype) bytes per element, and room for
  // whole vectors of 128 bytes. The first step reads no partial results.
  void (*accumulate)(void* destination, const void* partials, const void* source, int index,
                     size_t stride, size_t count);
  // The last of the `terms` steps of such a chain, at least 2: rounds to the element type.
  void (*finish)(void* destination, const void* partials, const void* source, int terms,
                 size_t stride, size_t count);
};

// Whether CPUs have kernels for `dtype` and `reduction`: all for float64, float32, float16 and
// bfloat16 but those of bits; all for integers and bool but averages; sums and averages of complex
// numbers.
bool has_reduce_kernels(DType dtype, Reduction reduction);

// Throws std::invalid_argument if has_reduce_kernels() is false.
const ReduceKernels& reduce_kernels(DType dtype, Reduction reduction, Isa isa = best_isa());

// Throws std::invalid_argument if `dtype` and `reduction` are not for all devices.
void check_reducible(DType dtype, Reduction reduction);

}  // namespace pipekernels
