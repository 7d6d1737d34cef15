// The instruction sets of this machine's processor, and tuning that depends on its vendor.
#pragma once

#include <cstdint>
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

// How many bytes ahead a kernel should prefetch that reads much memory in sequence, in elements of
// this size, on a processor of this CPUID vendor; 0 where its own prefetchers do as well. Those of
// an Intel Xeon (family 6, model 207) stop at the end of each page: there a core reads a fifth to a
// half faster. On AMD's Zen 3, elements that are widened fill the scheduler of floating-point
// operations before enough loads are under way: there a core reads 16-bit ones a tenth faster,
// 8-bit ones a tenth to a fifth.
int64_t prefetch_ahead(std::string_view vendor, int64_t element_size);

// The same for this machine's processor.
int64_t prefetch_ahead(int64_t element_size);

}  // namespace pipekernels
