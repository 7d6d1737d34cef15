#include "pipekernels/elements/cast.h"

namespace pipekernels {

// One table per source dtype, each with one entry per destination dtype.
const CastKernel* const* cast_tables_baseline();
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
const CastKernel* const* cast_tables_avx2();
const CastKernel* const* cast_tables_avx512();
#endif

CastKernel cast_kernel(DType from, DType to, [[maybe_unused]] Isa isa) {
  const CastKernel* const* tables = cast_tables_baseline();
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  if (isa == Isa::kAvx2) tables = cast_tables_avx2();
  if (isa >= Isa::kAvx512) tables = cast_tables_avx512();
#endif
  return tables[static_cast<int>(from)][static_cast<int>(to)];
}

}  // namespace pipekernels
