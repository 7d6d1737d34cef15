#include "pipekernels/reduce.h"

#include <stdexcept>
#include <string>

namespace pipekernels {

// One table per dtype, each with one entry per reduction.
const ReduceKernels* const* reduce_tables_baseline();
#if defined(__x86_64__)
const ReduceKernels* const* reduce_tables_avx2();
const ReduceKernels* const* reduce_tables_avx512();
#endif

void check_reducible(DType dtype, Reduction reduction) {
  if (!is_reducible(dtype)) {
    throw std::invalid_argument(std::string("cannot reduce ") + name_of(dtype) +
                                "; convert it to float64, float32, float16, bfloat16, int32 or "
                                "int64");
  }
  if (is_integer(dtype) && reduction == Reduction::kAvg) {
    throw std::invalid_argument(std::string("an average of ") + name_of(dtype) +
                                " is not an integer; use op='sum', or convert to a float type");
  }
}

bool isa_available(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kAvx2:  // The compiler may also use what the flags for these files name.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return isa_available(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
  }
#endif
  return isa == Isa::kBaseline;
}

Isa best_isa() {
  static const Isa best = isa_available(Isa::kAvx512) ? Isa::kAvx512
                          : isa_available(Isa::kAvx2) ? Isa::kAvx2
                                                      : Isa::kBaseline;
  return best;
}

const ReduceKernels& reduce_kernels(DType dtype, Reduction reduction, Isa isa) {
  const ReduceKernels* const* tables = reduce_tables_baseline();
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) tables = reduce_tables_avx2();
  if (isa == Isa::kAvx512) tables = reduce_tables_avx512();
#endif
  return tables[static_cast<int>(dtype)][static_cast<int>(reduction)];
}

const ReduceKernels& reduce_kernels(DType dtype, Reduction reduction) {
  return reduce_kernels(dtype, reduction, best_isa());
}

}  // namespace pipekernels
