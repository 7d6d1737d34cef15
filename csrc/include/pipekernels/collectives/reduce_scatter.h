// Reduce-scatter: every rank receives its slice of the elementwise reduction over all ranks.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// `input` has world_size slices of `count` elements; `output` has one slice and must not overlap
// `input`. The bits, `shape` and the exceptions are as for all_reduce().
void reduce_scatter(Communicator& communicator, const void* input, void* output, size_t count,
                    DType dtype, Reduction reduction, uint32_t shape = 0);

// The same on CUDA. Launches in the caller's stream and returns.
void reduce_scatter_cuda(CudaCommunicator& communicator, const void* input, void* output,
                         size_t count, DType dtype, Reduction reduction, uint32_t shape,
                         const CudaCaller& caller);

}  // namespace pipekernels
