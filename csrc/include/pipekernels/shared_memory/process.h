// Detection of forks, and of the end of other processes.
#pragma once

namespace pipekernels {

// The number of forks between the process that first called this and the current one. It differs
// between a parent and its child, and is cheaper than getpid().
unsigned process_generation();

// Returns a pidfd, which becomes readable when process `pid` has ended; the caller closes it.
// Throws std::system_error.
int open_pidfd(int pid);

}  // namespace pipekernels
