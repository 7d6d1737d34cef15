// The kernels for products of a few rows for x86-64 with AVX-512 (F, BW, VL, DQ).

namespace {
constexpr int kVectorBytes = 64;
}

#include "few_rows_impl.h"

namespace pipekernels {

const FewRowsKernels* const* few_rows_tables_avx512() { return kTables; }

}  // namespace pipekernels
