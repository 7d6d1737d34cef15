// The instruction sets of this machine's processor, and tuning that depends on its vendor.
#pragma once

#include <string_view>

namespace pipekernels {

// The instruction sets for which kernels are compiled, each in its own source file. kAvx512Bf16 is
// kAvx512 with instructions that round to bfloat16.
enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

bool isa_available(Isa isa);

// The widest one that this machine supports, which kernels use by default.
Isa best_isa();

// Whether a rank should prefetch for writing a cache line that its peers have read, on a processor
// of this CPUID vendor. Measured only on AMD's Zen 4 and Zen 5, where small sums gain up to a
// sixth; off on Intel and all others, where it has not been measured.
bool write_prefetch_pays(std::string_view vendor);

// The same for this machine's processor.
bool write_prefetch_pays();

}  // namespace pipekernels
