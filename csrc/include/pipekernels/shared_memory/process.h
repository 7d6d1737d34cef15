// What a process knows of itself and of others.
#pragma once

namespace pipekernels {

// How many forks lie between the first process and this one, which tells a child from its parent.
// Cheaper than getpid().
unsigned process_generation();

// A descriptor that is ready to be read when process `pid` has ended. Throws std::system_error.
int open_pidfd(int pid);

}  // namespace pipekernels
