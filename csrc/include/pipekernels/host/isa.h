// What the processor at hand can do, and what pays on it.
#pragma once

#include <string_view>

namespace pipekernels {

// The instruction sets that kernels are compiled for, each in a file of its own. kAvx512Bf16 is
// kAvx512 with instructions that round to bfloat16.
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

bool isa_available(Isa isa);

// The one that kernels use on this machine.
Isa best_isa();

// Whether a rank asks for a cache line that its peers have read before it writes to it again, on a
// processor of this CPUID vendor. Measured on AMD's Zen 4 and Zen 5 alone, where small sums gain up
// to a sixth; on Intel it has not been measured, so there, as on all others, it is off.
bool write_prefetch_pays(std::string_view vendor);

// On this machine.
bool write_prefetch_pays();

}  // namespace pipekernels
