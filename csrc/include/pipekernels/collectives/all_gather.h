// All-gather: every rank ends up with the data of all ranks.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// `input` has `count` elements; `output` has world_size times as many, in rank order. They do not
// overlap, unless `input` is this rank's part of `output`. Throws what communicator.h says.
void all_gather(Communicator& communicator, const void* input, void* output, size_t count,
                DType dtype, uint32_t shape = 0);

// On CUDA, in the caller's stream; returns at once.
void all_gather_cuda(CudaCommunicator& communicator, const void* input, void* output, size_t count,
                     DType dtype, uint32_t shape, const CudaCaller& caller);

}  // namespace pipekernels
