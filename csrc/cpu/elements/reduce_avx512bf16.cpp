// The reduction kernels of bfloat16 for x86-64 with AVX-512 (F, BW, VL, DQ, BF16).

namespace {
constexpr int kVectorBytes = 64;
}

#include "reduce_impl.h"

namespace pipekernels {

const ReduceKernels* reduce_table_avx512bf16() { return kFloatTable<Bf16>; }

}  // namespace pipekernels
