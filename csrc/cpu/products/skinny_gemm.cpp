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

const SkinnyGemmKernels& skinny_gemm_kernels(DType dtype, [[maybe_unused]] Isa isa) {
  const SkinnyGemmKernels* const* tables = skinny_gemm_tables_baseline();
#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
  if (isa == Isa::kAvx2) tables = skinny_gemm_tables_avx2();
  if (isa >= Isa::kAvx512) tables = skinny_gemm_tables_avx512();
#endif
  return *tables[static_cast<int>(dtype)];
}

void* kept_cache_lines(size_t bytes) {
  struct alignas(64) CacheLine {
    std::byte bytes[64];
  };
  thread_local std::vector<CacheLine> kept;
  kept.resize(std::max(kept.size(), (bytes + sizeof(CacheLine) - 1) / sizeof(CacheLine)));
  return kept.data();
}

int64_t columns_per_piece(int64_t row_bytes) {
  constexpr int64_t kBytesPerPiece = 128 << 10;
  return std::max<int64_t>(1, kBytesPerPiece / std::max<int64_t>(1, row_bytes));
}

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
static void run(const SkinnyGemm& product, int64_t slabs, size_t out_size, int threads,
                const SkinnyGemmKernels& table, void (*kernel)(const SkinnyGemmPiece&)) {
  const void* x = product.x;
  int64_t step = kTransposedColumns;
  if (!product.transposed) {
    const int64_t slab_inner = product.inner / slabs;
    void* const widened = kept_cache_lines(table.widened_bytes(slab_inner) * slabs * product.rows);
    table.widen(widened, product.x, product.rows * slabs, slab_inner);
    x = widened;
    step = columns_per_piece(product.inner * size_of(product.dtype));
  }
  const int64_t ahead = prefetch_ahead(size_of(product.dtype));
  parallel_for((product.columns + step - 1) / step, threads, [&](int64_t index) {
    SkinnyGemmPiece piece{};
    for (int64_t r = 0; r < product.rows; ++r) {
      piece.out[r] = static_cast<std::byte*>(product.out) + r * product.columns * out_size;
    }
    piece.widened = x;
    piece.weight = product.weight;
    piece.bias = product.bias;
    piece.columns = product.columns;
    piece.inner = product.inner;
    piece.slabs = slabs;
    piece.ahead = ahead;
    piece.begin = index * step;
    piece.end = std::min(product.columns, piece.begin + step);
    kernel(piece);
  });
}

void skinny_gemm(const SkinnyGemm& product, int threads, Isa isa) {
  check(product);
  const SkinnyGemmKernels& table = skinny_gemm_kernels(product.dtype, isa);
  const auto& kernels = product.transposed ? table.transposed_products : table.products;
  run(product, 1, size_of(product.dtype), threads, table, kernels[product.rows - 1]);
}

void skinny_gemm_partial(const SkinnyGemm& product, int64_t slabs, int threads, Isa isa) {
  check(product);
  if (product.bias != nullptr) {
    throw std::invalid_argument("a partial product takes no bias; add it to the sum of all");
  }
  if (product.transposed) {
    throw std::invalid_argument("a partial product takes no transposed weight; copy it");
  }
  if (slabs < 1 || (slabs & (slabs - 1)) != 0 || product.inner % slabs != 0) {
    throw std::invalid_argument("slabs must be a power of two that divides the inner dimension " +
                                std::to_string(product.inner) + ", got " + std::to_string(slabs));
  }
  const SkinnyGemmKernels& table = skinny_gemm_kernels(product.dtype, isa);
  run(product, slabs, partial_size_of(product.dtype), threads, table,
      table.partial_products[product.rows - 1]);
}

}  // namespace pipekernels
