// All-reduce: every rank ends up with the elementwise reduction over all ranks.
#pragma once

#include <cstddef>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"
#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

class CudaCommunicator;
struct CudaCaller;

// Reduces `count` elements at `data` in place. Every algorithm gives every rank the same bits:
// those of the reduction in rank order, see reduce.h. `shape`: a digest that ranks compare. Throws
// std::invalid_argument for a dtype or reduction that reduce.h does not have, and what
// communicator.h says.
void all_reduce(Communicator& communicator, void* data, size_t count, DType dtype,
                Reduction reduction, Algorithm algorithm, uint32_t shape = 0);

// What Algorithm::kAuto stands for: one_shot up to the communicator's one_shot_bytes(), or up to a
// built-in size if that is 0 (in place, where few ranks find all tensors to be symmetric); else
// two_shot. The same on all ranks.
Algorithm choose_algorithm(size_t bytes, const Communicator& communicator);

// On CUDA, in the caller's stream; returns at once. A call with one rank does nothing.
void all_reduce_cuda(CudaCommunicator& communicator, void* data, size_t count, DType dtype,
                     Reduction reduction, Algorithm algorithm, uint32_t shape,
                     const CudaCaller& caller);

// As two_shot, by at most `blocks` thread blocks, while another stream still writes the data: see
// Gates in device_memory.h.
void all_reduce_when_ready_cuda(CudaCommunicator& communicator, void* data, size_t count,
                                DType dtype, Reduction reduction, const Gates& gates, int blocks,
                                uint32_t shape, const CudaCaller& caller);

}  // namespace pipekernels
