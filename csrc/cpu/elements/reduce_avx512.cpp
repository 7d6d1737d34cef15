// The reduction kernels for x86-64 with AVX-512 (F, BW, VL, DQ).

namespace {
constexpr int kVectorBytes = 64;
}

#include "reduce_impl.h"

namespace pipekernels {

const ReduceKernels* const* reduce_tables_avx512() { return kTables; }

}  // namespace pipekernels
