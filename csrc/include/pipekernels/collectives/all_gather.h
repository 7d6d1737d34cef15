// All-gather: every rank receives the data of all ranks.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// Gathers `count` elements at `input` of each rank into `output`, in rank order. They must not
// overlap, unless `input` is this rank's part of `output`. `shape`: a digest of the input's shape,
// which must be equal on all ranks. Throws the exceptions of errors.h.
void all_gather(Communicator& communicator, const void* input, void* output, size_t count,
                DType dtype, uint32_t shape = 0);

// The same on CUDA. Launches in the caller's stream and returns.
void all_gather_cuda(CudaCommunicator& communicator, const void* input, void* output, size_t count,
                     DType dtype, uint32_t shape, const CudaCaller& caller);

}  // namespace pipekernels
