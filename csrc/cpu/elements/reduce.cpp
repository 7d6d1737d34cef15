#include "pipekernels/elements/reduce.h"

#include <stdexcept>
#include <string>

namespace pipekernels {

// One table per dtype, each with one entry per reduction; null and empty where there is none.
const ReduceKernels* const* reduce_tables_baseline();
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
const ReduceKernels* const* reduce_tables_avx2();
const ReduceKernels* const* reduce_tables_avx512();
const ReduceKernels* reduce_table_avx512bf16();  // Only of bfloat16.
#endif

namespace {

void check_average(DType dtype, Reduction reduction) {
  if (is_integer(dtype) && is_average(reduction)) {
    throw std::invalid_argument(std::string("an average of ") + name_of(dtype) +
                                " is not an integer; use op='sum', or convert to a float type");
  }
}

}  // namespace

void check_reducible(DType dtype, Reduction reduction) {
  if (!is_reducible(dtype)) {
    throw std::invalid_argument(std::string("cannot reduce ") + name_of(dtype) +
                                "; convert it to float64, float32, float16, bfloat16, int32 or "
                                "int64");
  }
  if (static_cast<int>(reduction) >= kDeviceReductions) {
    throw std::invalid_argument(std::string("a ") + name_of(reduction) + " is for CPU tensors");
  }
  check_average(dtype, reduction);
}

bool has_reduce_kernels(DType dtype, Reduction reduction) {
  const ReduceKernels* table = reduce_tables_baseline()[static_cast<int>(dtype)];
  return table != nullptr && table[static_cast<int>(reduction)].reduce != nullptr;
}

const ReduceKernels& reduce_kernels(DType dtype, Reduction reduction, [[maybe_unused]] Isa isa) {
  if (!has_reduce_kernels(dtype, reduction)) {
    check_average(dtype, reduction);
    throw std::invalid_argument(std::string(name_of(dtype)) + " has no reduction '" +
                                name_of(reduction) + "'");
  }
  const ReduceKernels* const* tables = reduce_tables_baseline();
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  if (isa == Isa::kAvx2) tables = reduce_tables_avx2();
  if (isa >= Isa::kAvx512) tables = reduce_tables_avx512();
#if defined(PIPEKERNELS_AVX512BF16)
  if (isa == Isa::kAvx512Bf16 && dtype == DType::kBFloat16) {
    return reduce_table_avx512bf16()[static_cast<int>(reduction)];
  }
#endif
#endif
  return tables[static_cast<int>(dtype)][static_cast<int>(reduction)];
}

}  // namespace pipekernels
