// The kernels for products of a few rows for x86-64 with AVX2.

namespace {
constexpr int kVectorBytes = 32;
}

#include "few_rows_impl.h"

namespace pipekernels {

const FewRowsKernels* const* few_rows_tables_avx2() { return kTables; }

}  // namespace pipekernels
