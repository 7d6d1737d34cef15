// All-reduce: every rank receives the elementwise reduction over all ranks.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// Reduces `count` elements at `data` in place. Every algorithm gives every rank the same bits:
// those of the reduction in rank order, or in tree order if `reduction` says so; see reduce.h.
// `shape`: a digest of the tensor's shape, which must be equal on all ranks. Throws
// std::invalid_argument for a dtype and reduction without kernels (reduce.h), and the exceptions of
// errors.h.
void all_reduce(Communicator& communicator, void* data, size_t count, DType dtype,
                Reduction reduction, Algorithm algorithm, uint32_t shape = 0);

// The same for rank `root` alone. The data of the others are undefined afterwards.
void reduce(Communicator& communicator, void* data, size_t count, DType dtype, Reduction reduction,
            int root);

// The algorithm that Algorithm::kAuto selects, the same on all ranks: one_shot up to a size that
// depends on their number, else two_shot. If few ranks select one_shot and all their tensors are
// symmetric, they reduce in place instead.
Algorithm choose_algorithm(size_t bytes, int ranks);

// The same on CUDA. Launches in the caller's stream and returns; a single rank launches nothing.
void all_reduce_cuda(CudaCommunicator& communicator, void* data, size_t count, DType dtype,
                     Reduction reduction, Algorithm algorithm, uint32_t shape,
                     const CudaCaller& caller);

}  // namespace pipekernels
