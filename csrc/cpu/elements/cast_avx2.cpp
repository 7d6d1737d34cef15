// The conversion kernels for x86-64 with AVX2.

namespace {
constexpr int kVectorBytes = 32;
}

#include "cast_impl.h"

namespace pipekernels {

const CastKernel* const* cast_tables_avx2() { return kTables; }

}  // namespace pipekernels
