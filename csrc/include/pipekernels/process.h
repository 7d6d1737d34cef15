// Tells a forked child from its parent.
#pragma once

namespace pipekernels {

// How many forks lie between the first process and this one. Cheaper than getpid().
unsigned process_generation();

}  // namespace pipekernels
