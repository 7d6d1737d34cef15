#include "pipekernels/products/integer_product.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__) && !defined(PIPEKERNELS_PORTABLE)
#include <cpuid.h>
#endif

#include "integer_product_kernels.h"
#include "pipekernels/host/isa.h"
#include "pipekernels/host/parallel_for.h"
#include "skinny_gemm_kernels.h"

namespace pipekernels {

const IntegerKernels& integer_kernels_portable();
#if defined(PIPEKERNELS_VNNI)
const IntegerKernels& integer_kernels_avx2();
const IntegerKernels& integer_kernels_avxvnni();
const IntegerKernels& integer_kernels_avx512vnni();

// Not every compiler's __builtin_cpu_supports() knows it.
static bool has_avxvnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
#endif

bool integer_isa_available(IntegerIsa isa) {
#if defined(PIPEKERNELS_VNNI)
  if (isa == IntegerIsa::kAvx2) return isa_available(Isa::kAvx2);
  if (isa == IntegerIsa::kAvxVnni) return isa_available(Isa::kAvx2) && has_avxvnni();
  if (isa == IntegerIsa::kAvx512Vnni) {
    return isa_available(Isa::kAvx512) && __builtin_cpu_supports("avx512vnni");
  }
#endif
  return isa == IntegerIsa::kPortable;
}

IntegerIsa best_integer_isa() {
  static const IntegerIsa best = [] {
    IntegerIsa fastest = IntegerIsa::kPortable;
    for (const IntegerIsa isa : kIntegerIsas) {
      if (integer_isa_available(isa)) fastest = isa;
    }
    return fastest;
  }();
  return best;
}

static const IntegerKernels& integer_kernels([[maybe_unused]] IntegerIsa isa) {
#if defined(PIPEKERNELS_VNNI)
  if (isa == IntegerIsa::kAvx2) return integer_kernels_avx2();
  if (isa == IntegerIsa::kAvxVnni) return integer_kernels_avxvnni();
  if (isa == IntegerIsa::kAvx512Vnni) return integer_kernels_avx512vnni();
#endif
  return integer_kernels_portable();
}

static void check(const IntegerProduct& product, const IntegerMatrix& matrix) {
  if (product.dtype != DType::kFloat32 && product.dtype != DType::kBFloat16) {
    throw std::invalid_argument(
        std::string("a product of integers takes float32 or bfloat16, got ") +
        name_of(product.dtype));
  }
  if (matrix.bits != 8 && matrix.bits != 4) {
    throw std::invalid_argument("a matrix of integers has 8 or 4 bits, got " +
                                std::to_string(matrix.bits));
  }
  if (!is_floating(matrix.scale_dtype) || matrix.scale_dtype == DType::kFloat64) {
    throw std::invalid_argument(std::string("scales are float32, float16 or bfloat16, got ") +
                                name_of(matrix.scale_dtype));
  }
  if (matrix.group < 1 || (matrix.group % kIntegerBlock != 0 && matrix.group < matrix.inner)) {
    throw std::invalid_argument("a group must be a multiple of " + std::to_string(kIntegerBlock) +
                                " elements, or all of a row, got " + std::to_string(matrix.group));
  }
}

// Memory for `rows` rows, which the thread keeps between calls.
static RoundedRows kept_rows(int64_t rows, int64_t blocks) {
  const int64_t all = rows * blocks;
  auto* const memory = static_cast<std::byte*>(
      kept_cache_lines(all * (kIntegerBlock + sizeof(float) + sizeof(int32_t))));
  auto* const scales = reinterpret_cast<float*>(memory + all * kIntegerBlock);
  return {reinterpret_cast<int8_t*>(memory), scales, reinterpret_cast<int32_t*>(scales + all)};
}

static RoundedRows row_of(const RoundedRows& rows, int64_t row, int64_t blocks) {
  const int64_t first = row * blocks;
  return {rows.values + first * kIntegerBlock, rows.scales + first, rows.sums + first};
}

void integer_product(const IntegerProduct& product, const IntegerMatrix& matrix, int threads,
                     IntegerIsa isa) {
  // All rows with the only matrix.
  const std::vector<int64_t> chosen(product.rows, 0);
  integer_expert_product(product, matrix, chosen.data(), product.rows, 1, threads, isa);
}

void integer_expert_product(const IntegerProduct& product, const IntegerMatrix& matrix,
                            const int64_t* chosen, int64_t pairs, int64_t experts, int threads,
                            IntegerIsa isa) {
  check(product, matrix);
  if (product.rows < 1) return;
  if (pairs % product.rows != 0) {
    throw std::invalid_argument("the number of rows, " + std::to_string(product.rows) +
                                ", must divide the number of chosen experts, " +
                                std::to_string(pairs));
  }
  for (int64_t p = 0; p < pairs; ++p) {
    if (chosen[p] < 0 || chosen[p] >= experts) {
      throw std::invalid_argument("an expert must be in 0.." + std::to_string(experts - 1) +
                                  ", got " + std::to_string(chosen[p]));
    }
  }
  const IntegerKernels& kernels = integer_kernels(isa);
  const int64_t blocks = matrix.blocks(), tiles = matrix.tiles();
  const int64_t size = size_of(product.dtype), scale_size = size_of(matrix.scale_dtype);
  const int64_t scales_per_tile = matrix.groups() * kIntegerTile;
  const auto* const x = static_cast<const std::byte*>(product.x);
  auto* const out = static_cast<std::byte*>(product.out);

  // Pairs of the same expert follow each other, and are one product.
  std::vector<int64_t> order(pairs), firsts;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return chosen[a] < chosen[b]; });
  const RoundedRows rounded = kept_rows(pairs, blocks);
  parallel_for(pairs, pairs < 16 ? 1 : threads, [&](int64_t i) {
    const int64_t row = order[i] / (pairs / product.rows);
    kernels.round(row_of(rounded, i, blocks), x + row * matrix.inner * size, matrix.inner,
                  product.dtype);
  });
  for (int64_t i = 0; i < pairs; ++i) {
    if (i == 0 || chosen[order[i]] != chosen[order[i - 1]]) firsts.push_back(i);
  }
  const int64_t groups = firsts.size();
  firsts.push_back(pairs);

  const int64_t ahead = prefetch_ahead(1);
  const int64_t step = std::max<int64_t>(1, columns_per_piece(matrix.tile_bytes()));
  const int64_t pieces = (tiles + step - 1) / step;
  parallel_for(groups * pieces, threads, [&](int64_t index) {
    const int64_t first = firsts[index / pieces], rows = firsts[index / pieces + 1] - first;
    const int64_t expert = chosen[order[first]];
    std::vector<void*> outputs(rows);
    IntegerPiece piece{};
    piece.x = row_of(rounded, first, blocks);
    piece.out = outputs.data();
    piece.rows = rows;
    piece.blocks = blocks;
    piece.blocks_per_group = std::min(blocks, std::max<int64_t>(1, matrix.group / kIntegerBlock));
    if (matrix.group >= matrix.inner) piece.blocks_per_group = blocks;
    piece.ahead = ahead;
    piece.dtype = product.dtype;
    piece.scale_dtype = matrix.scale_dtype;
    const int64_t begin = index % pieces * step;
    for (int64_t tile = begin; tile < std::min(tiles, begin + step); ++tile) {
      const int64_t place = expert * tiles + tile, column = tile * kIntegerTile;
      piece.values = matrix.values + place * matrix.tile_bytes();
      piece.scales =
          static_cast<const std::byte*>(matrix.scales) + place * scales_per_tile * scale_size;
      if (matrix.zeros != nullptr) piece.zeros = matrix.zeros + place * scales_per_tile;
      if (product.bias != nullptr) {
        piece.bias =
            static_cast<const std::byte*>(product.bias) + (expert * matrix.columns + column) * size;
      }
      piece.columns = std::min(kIntegerTile, matrix.columns - column);
      for (int64_t r = 0; r < rows; ++r) {
        outputs[r] = out + (order[first + r] * matrix.columns + column) * size;
      }
      (matrix.bits == 8 ? kernels.product8 : kernels.product4)(piece);
    }
  });
}

}  // namespace pipekernels
