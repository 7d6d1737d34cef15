// The instruction sets that kernels are compiled for, each in a file of its own.
#pragma once

namespace pipekernels {

enum class Isa { kBaseline, kAvx2, kAvx512 };

bool isa_available(Isa isa);

// The one that kernels use on this machine.
Isa best_isa();

}  // namespace pipekernels
