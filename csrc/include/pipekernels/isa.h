// The instruction sets that kernels are compiled for, each in a file of its own.
#pragma once

namespace pipekernels {

// kAvx512Bf16 is kAvx512 with instructions that round to bfloat16.
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

bool isa_available(Isa isa);

// The one that kernels use on this machine.
Isa best_isa();

}  // namespace pipekernels
