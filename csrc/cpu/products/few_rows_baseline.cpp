// The kernels for products of a few rows for any CPU: 16-byte vectors.

namespace {
constexpr int kVectorBytes = 16;
}

#include "few_rows_impl.h"

namespace pipekernels {

const FewRowsKernels* const* few_rows_tables_baseline() { return kTables; }

}  // namespace pipekernels
