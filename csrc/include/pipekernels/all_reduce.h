// All-reduce: every rank ends up with the elementwise reduction over all ranks.
#pragma once

#include <cstddef>

#include "pipekernels/communicator.h"
#include "pipekernels/dtype.h"

namespace pipekernels {

// Reduces `count` elements at `data` in place. Every algorithm gives every rank the same bits:
// those of the reduction in rank order, see reduce.h. `shape`: a digest that ranks compare. Throws
// std::invalid_argument for a dtype or reduction that reduce.h does not have, and what
// communicator.h says.
void all_reduce(Communicator& communicator, void* data, size_t count, DType dtype,
                Reduction reduction, Algorithm algorithm, uint32_t shape = 0);

// What Algorithm::kAuto stands for: one_shot up to the communicator's one_shot_bytes(), or up to a
// built-in size if that is 0; else two_shot. The same on all ranks.
Algorithm choose_algorithm(size_t bytes, const Communicator& communicator);

}  // namespace pipekernels
