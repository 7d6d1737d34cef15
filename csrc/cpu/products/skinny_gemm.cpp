#include "pipekernels/products/skinny_gemm.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "pipekernels/host/parallel_for.h"
#include "skinny_gemm_kernels.h"

namespace pipekernels {

// One table per dtype.
const SkinnyGemmKernels* const* skinny_gemm_tables_baseline();
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
const SkinnyGemmKernels* const* skinny_gemm_tables_avx2();
const SkinnyGemmKernels* const* skinny_gemm_tables_avx512();
#endif

static const SkinnyGemmKernels& kernels(DType dtype, [[maybe_unused]] Isa isa) {
  const SkinnyGemmKernels* const* tables = skinny_gemm_tables_baseline();
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  if (isa == Isa::kAvx2) tables = skinny_gemm_tables_avx2();
  if (isa >= Isa::kAvx512) tables = skinny_gemm_tables_avx512();
#endif
  return *tables[static_cast<int>(dtype)];
}

struct alignas(64) CacheLine {
  std::byte bytes[64];
};

static void check(const SkinnyGemm& product) {
  if (product.rows < 1 || product.rows > kMaxSkinnyRows) {
    throw std::invalid_argument("a product of a few rows takes 1 to " +
                                std::to_string(kMaxSkinnyRows) + " rows, got " +
                                std::to_string(product.rows));
  }
  if (!is_floating(product.dtype)) {
    throw std::invalid_argument(std::string("a product of a few rows takes floats, got ") +
                                name_of(product.dtype));
  }
}

// Runs `kernel`, of `table`, on pieces of the columns.
static void run(const SkinnyGemm& product, int64_t slabs, int threads,
                const SkinnyGemmKernels& table, void (*kernel)(const SkinnyGemmPiece&)) {
  // Kept between calls. Vectors that straddle cache lines would take twice as long to load.
  thread_local std::vector<CacheLine> kept;
  const int64_t slab_inner = product.inner / slabs;
  const size_t bytes = table.widened_bytes(slab_inner) * slabs * product.rows;
  kept.resize(std::max(kept.size(), (bytes + sizeof(CacheLine) - 1) / sizeof(CacheLine)));
  void* const widened = kept.data();
  table.widen(widened, product.x, product.rows * slabs, slab_inner);

  constexpr int64_t kBytesPerPiece = 128 << 10;
  const int64_t row_bytes = std::max<int64_t>(1, product.inner * size_of(product.dtype));
  const int64_t step = std::max<int64_t>(1, kBytesPerPiece / row_bytes);
  parallel_for((product.columns + step - 1) / step, threads, [&](int64_t piece) {
    const int64_t begin = piece * step, end = std::min(product.columns, begin + step);
    kernel({product.out, widened, product.weight, product.bias, product.columns, product.inner,
            slabs, begin, end});
  });
}

void skinny_gemm(const SkinnyGemm& product, int threads, Isa isa) {
  check(product);
  const SkinnyGemmKernels& table = kernels(product.dtype, isa);
  run(product, 1, threads, table, table.products[product.rows - 1]);
}

void skinny_gemm_partial(const SkinnyGemm& product, int64_t slabs, int threads, Isa isa) {
  check(product);
  if (product.bias != nullptr) {
    throw std::invalid_argument("a partial product takes no bias; add it to the sum of all");
  }
  if (slabs < 1 || (slabs & (slabs - 1)) != 0 || product.inner % slabs != 0) {
    throw std::invalid_argument("slabs must be a power of two that divides the inner dimension " +
                                std::to_string(product.inner) + ", got " + std::to_string(slabs));
  }
  const SkinnyGemmKernels& table = kernels(product.dtype, isa);
  run(product, slabs, threads, table, table.partial_products[product.rows - 1]);
}

}  // namespace pipekernels
