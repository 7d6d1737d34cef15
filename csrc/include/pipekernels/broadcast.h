// Broadcast: every rank ends up with the data of one rank.
#pragma once

#include <cstddef>

#include "pipekernels/communicator.h"
#include "pipekernels/dtype.h"

namespace pipekernels {

// Copies `count` elements from `data` of rank `root` to `data` of all others. Throws
// std::invalid_argument if `root` is no rank, and what communicator.h says.
void broadcast(Communicator& communicator, void* data, size_t count, DType dtype, int root,
               uint32_t shape = 0);

}  // namespace pipekernels
