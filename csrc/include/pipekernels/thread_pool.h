// One process-wide pool of worker threads for the CPU operations.
#pragma once

#include <cstdint>
#include <functional>

namespace pipekernels {

// Calls body(i) once for every i in [0, pieces), on the calling thread and at most threads - 1
// workers, and returns when all calls have returned. `body` must not throw.
//
// Workers start on first use and sleep between calls. The calling thread takes pieces too, so a
// worker that wakes late costs nothing. Serves one caller at a time: a second concurrent caller (a
// lane of a pipeline) runs its own pieces alone. A forked child starts with no workers and grows
// its own.
void parallel_for(int64_t pieces, int threads, const std::function<void(int64_t)>& body);

}  // namespace pipekernels
