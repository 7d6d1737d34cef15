// The conversion kernels for any CPU: 16-byte vectors.

namespace {
constexpr int kVectorBytes = 16;
}

#include "cast_impl.h"

namespace pipekernels {

const CastKernel* const* cast_tables_baseline() { return kTables; }

}  // namespace pipekernels
