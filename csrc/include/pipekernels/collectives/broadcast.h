// Broadcast: every rank ends up with the data of one rank.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// Copies `count` elements from `data` of rank `root` to `data` of all others. Throws
// std::invalid_argument if `root` is no rank, and what communicator.h says.
void broadcast(Communicator& communicator, void* data, size_t count, DType dtype, int root,
               uint32_t shape = 0);

// On CUDA, in the caller's stream; returns at once.
void broadcast_cuda(CudaCommunicator& communicator, void* data, size_t count, DType dtype, int root,
                    uint32_t shape, const CudaCaller& caller);

// Throws std::invalid_argument unless `root` is a rank.
void check_root(int root, int world_size);

}  // namespace pipekernels
