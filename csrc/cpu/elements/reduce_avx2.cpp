// The reduction kernels for x86-64 with AVX2.

namespace {
constexpr int kVectorBytes = 32;
}

#include "reduce_impl.h"

namespace pipekernels {

const ReduceKernels* const* reduce_tables_avx2() { return kTables; }

}  // namespace pipekernels
