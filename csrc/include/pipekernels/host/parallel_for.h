// Loops on the threads that torch runs its own CPU operations on.
#pragma once

#include <cstdint>
#include <functional>

namespace pipekernels {

// Calls body(i) once for every i in [0, pieces), on the calling thread and at most threads - 1
// others, and returns when all calls have returned. `body` must not throw.
//
// The others belong to the OpenMP runtime that torch has loaded: those of a pool of our own would
// contend for cores with them, as they spin for a while after each of torch's operations, and would
// have to be woken, which takes longer than many a copy. The calling thread does everything itself
// where no such runtime is loaded, and in a forked child, whose runtime knows threads that the
// child does not have.
void parallel_for(int64_t pieces, int threads, const std::function<void(int64_t)>& body);

}  // namespace pipekernels
