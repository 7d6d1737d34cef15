// The reduction kernels for any CPU: 16-byte vectors.

namespace {
constexpr int kVectorBytes = 16;
}

#include "reduce_impl.h"

namespace pipekernels {

const ReduceKernels* const* reduce_tables_baseline() { return kTables; }

}  // namespace pipekernels
