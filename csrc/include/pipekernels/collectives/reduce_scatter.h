// Reduce-scatter: every rank ends up with its slice of the elementwise reduction over all ranks.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// `input` has world_size slices of `count` elements, `output` has one and does not overlap it. The
// bits are those of all_reduce(). Throws as all_reduce() does.
void reduce_scatter(Communicator& communicator, const void* input, void* output, size_t count,
                    DType dtype, Reduction reduction, uint32_t shape = 0);

// On CUDA, in the caller's stream; returns at once.
void reduce_scatter_cuda(CudaCommunicator& communicator, const void* input, void* output,
                         size_t count, DType dtype, Reduction reduction, uint32_t shape,
                         const CudaCaller& caller);

}  // namespace pipekernels
