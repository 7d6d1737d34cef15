// Parallel loops on the threads that run torch's own CPU operations.
#pragma once

#include <cstdint>
#include <functional>

namespace pipekernels {

// Calls body(i) once for every i in [0, pieces), on the calling thread and at most threads - 1
// others, and returns when all calls have returned. `body` must not throw.
//
// The other threads belong to the OpenMP runtime that torch has loaded. The threads of a separate
// pool would compete with them for cores, since OpenMP threads spin for a while after each of
// torch's operations, and would have to be woken, which takes longer than many copies. The calling
// thread runs the whole loop if no such runtime is loaded, and in a forked child, where the
// runtime's threads no longer exist.
void parallel_for(int64_t pieces, int threads, const std::function<void(int64_t)>& body);

}  // namespace pipekernels
