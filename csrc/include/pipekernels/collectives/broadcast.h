// Broadcast: every rank receives the data of one rank.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// Copies `count` elements from `data` of rank `root` to `data` of all other ranks. `shape`: a
// digest of the tensor's shape, which must be equal on all ranks. Throws std::invalid_argument if
// `root` is not a rank, and the exceptions of errors.h.
void broadcast(Communicator& communicator, void* data, size_t count, DType dtype, int root,
               uint32_t shape = 0);

// The same on CUDA. Launches in the caller's stream and returns.
void broadcast_cuda(CudaCommunicator& communicator, void* data, size_t count, DType dtype, int root,
                    uint32_t shape, const CudaCaller& caller);

// Throws std::invalid_argument unless `root` is a rank.
void check_root(int root, int world_size);

}  // namespace pipekernels
