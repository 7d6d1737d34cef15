// Gather: one rank receives the data of all. Scatter: one rank sends each rank its own.
#pragma once

#include <cstddef>
#include <vector>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels {

// Copies `count` elements at `input` of each rank to outputs[rank] of rank `root`; on the others
// `outputs` is empty. An output may be this rank's input; otherwise they must not overlap. Throws
// std::invalid_argument unless `root` is a rank with an output per rank, and the exceptions of
// errors.h.
void gather(Communicator& communicator, const void* input, const std::vector<void*>& outputs,
            size_t count, DType dtype, int root);

// Copies `count` elements at inputs[rank] of rank `root` to `output` of each rank. Otherwise as
// gather().
void scatter(Communicator& communicator, const std::vector<const void*>& inputs, void* output,
             size_t count, DType dtype, int root);

}  // namespace pipekernels
