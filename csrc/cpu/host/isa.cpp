#include "pipekernels/host/isa.h"

#include <cstring>
#include <string>

#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
#include <cpuid.h>
#endif

namespace pipekernels {

#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
// __builtin_cpu_supports("f16c") does not exist before GCC 11 and in some versions of Clang.
static bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

bool isa_available(Isa isa) {
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kAvx2:  // All instruction sets of the flags in CMakeLists.txt.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case Isa::kAvx512:
      return isa_available(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
    case Isa::kAvx512Bf16:
#if defined(PIPEKERNELS_AVX512BF16)
      return isa_available(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16");
#else
      return false;
#endif
  }
#endif
  return isa == Isa::kBaseline;
}

Isa best_isa() {
  static const Isa best = isa_available(Isa::kAvx512Bf16) ? Isa::kAvx512Bf16
                          : isa_available(Isa::kAvx512)   ? Isa::kAvx512
                          : isa_available(Isa::kAvx2)     ? Isa::kAvx2
                                                          : Isa::kBaseline;
  return best;
}

// Empty where there is no CPUID.
static std::string cpu_vendor() {
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  unsigned eax, parts[3];  // "Auth" "enti" "cAMD"
  if (__get_cpuid(0, &eax, &parts[0], &parts[2], &parts[1]) == 0) return "";
  char vendor[sizeof(parts)];
  std::memcpy(vendor, parts, sizeof(parts));
  return std::string(vendor, sizeof(vendor));
#else
  return "";
#endif
}

bool write_prefetch_pays(std::string_view vendor) { return vendor == "AuthenticAMD"; }

bool write_prefetch_pays() {
  static const bool pays = write_prefetch_pays(cpu_vendor());
  return pays;
}

int64_t prefetch_ahead(std::string_view vendor, int64_t element_size) {
  if (vendor == "GenuineIntel") return 8192;
  if (vendor == "AuthenticAMD") return element_size < 4 ? 2048 : 512;
  return 0;
}

int64_t prefetch_ahead(int64_t element_size) {
  static const std::string vendor = cpu_vendor();
  return prefetch_ahead(vendor, element_size);
}

}  // namespace pipekernels
