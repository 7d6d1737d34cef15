// The conversion kernels for x86-64 with AVX-512 (F, BW, VL, DQ).

namespace {
constexpr int kVectorBytes = 64;
}

#include "cast_impl.h"

namespace pipekernels {

const CastKernel* const* cast_tables_avx512() { return kTables; }

}  // namespace pipekernels
