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
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
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
const IntegerKernels& integer_kernels_amx();

// Not every compiler's __builtin_cpu_supports() knows it.
static bool has_avxvnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}

// Linux gives a process the matrix registers when it asks for them.
static bool has_amx() {
  static const bool has = [] {
#if defined(__linux__)
    constexpr int kAskForRegisters = 0x1023, kTileData = 18;
    constexpr unsigned kTilesAndInt8 = 3u << 24;
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
           (edx & kTilesAndInt8) == kTilesAndInt8 &&
           syscall(SYS_arch_prctl, kAskForRegisters, kTileData) == 0;
#else
    return false;
#endif
  }();
  return has;
}
#endif

bool integer_isa_available(IntegerIsa isa) {
#if defined(PIPEKERNELS_VNNI)
  if (isa == IntegerIsa::kAvx2) return isa_available(Isa::kAvx2);
  if (isa == IntegerIsa::kAvxVnni) return isa_available(Isa::kAvx2) && has_avxvnni();
  if (isa == IntegerIsa::kAvx512Vnni) {
    return isa_available(Isa::kAvx512) && __builtin_cpu_supports("avx512vnni");
  }
  if (isa == IntegerIsa::kAmx) return integer_isa_available(IntegerIsa::kAvx512Vnni) && has_amx();
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
  if (isa == IntegerIsa::kAmx) return integer_kernels_amx();
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
  if (matrix.group < 1 || (matrix.group % kIntegerStep != 0 && matrix.group < matrix.inner)) {
    throw std::invalid_argument("a group must be a multiple of " + std::to_string(kIntegerStep) +
                                " elements, or all of a row, got " + std::to_string(matrix.group));
  }
}

static RoundedShape rounded_shape(const IntegerMatrix& matrix) {
  RoundedShape shape{};
  shape.inner = matrix.inner;
  shape.block = matrix.block();
  shape.blocks = (matrix.inner + shape.block - 1) / shape.block;
  // An odd number of spans: the same place of neighbouring rows is in other sets of the cache.
  shape.bytes = ((matrix.inner + kIntegerSpan - 1) / kIntegerSpan | 1) * kIntegerSpan;
  return shape;
}

// Memory for `rows` rows, which the thread keeps between calls.
static RoundedRows kept_rows(int64_t rows, const RoundedShape& shape) {
  const int64_t readable = rows + kIntegerRows - 1, bytes = readable * shape.bytes;
  auto* const memory = static_cast<std::byte*>(
      kept_cache_lines(bytes + rows * shape.blocks * (sizeof(float) + sizeof(int32_t))));
  auto* const scales = reinterpret_cast<float*>(memory + bytes);
  return {reinterpret_cast<int8_t*>(memory), scales,
          reinterpret_cast<int32_t*>(scales + rows * shape.blocks)};
}

static RoundedRows row_of(const RoundedRows& rows, int64_t row, const RoundedShape& shape) {
  const int64_t first = row * shape.blocks;
  return {rows.values + row * shape.bytes, rows.scales + first, rows.sums + first};
}

// Rows that stay in a core's own cache while the columns pass.
static int64_t rows_per_piece(const RoundedShape& shape) {
  constexpr int64_t kBytes = 1 << 20;
  const int64_t rows = kBytes / shape.bytes / kIntegerRows * kIntegerRows;
  return std::clamp(rows, kIntegerRows, kMostIntegerRows);
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
  const RoundedShape shape = rounded_shape(matrix);
  const int64_t tiles = matrix.tiles();
  const int64_t size = size_of(product.dtype), scale_size = size_of(matrix.scale_dtype);
  const int64_t scales_per_tile = matrix.groups() * kIntegerTile;
  const auto* const x = static_cast<const std::byte*>(product.x);
  auto* const out = static_cast<std::byte*>(product.out);

  // Pairs of the same expert follow each other, and are one product.
  std::vector<int64_t> order(pairs), firsts;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return chosen[a] < chosen[b]; });
  const RoundedRows rounded = kept_rows(pairs, shape);
  parallel_for(pairs, pairs < 16 ? 1 : threads, [&](int64_t i) {
    const int64_t row = order[i] / (pairs / product.rows);
    kernels.round(shape, row_of(rounded, i, shape), x + row * matrix.inner * size, product.dtype);
  });
  for (int64_t i = 0; i < pairs; ++i) {
    if (i == 0 || chosen[order[i]] != chosen[order[i - 1]]) firsts.push_back(i);
  }
  const int64_t groups = firsts.size();
  firsts.push_back(pairs);

  const int64_t ahead = prefetch_ahead(1);
  const int64_t step = std::max<int64_t>(1, columns_per_piece(matrix.tile_bytes()));
  const int64_t pieces = (tiles + step - 1) / step, most_rows = rows_per_piece(shape);
  parallel_for(groups * pieces, threads, [&](int64_t index) {
    const int64_t expert = chosen[order[firsts[index / pieces]]];
    const int64_t end = firsts[index / pieces + 1], begin = index % pieces * step;
    void* outputs[kMostIntegerRows];
    IntegerPiece piece{};
    piece.shape = shape;
    piece.out = outputs;
    piece.blocks_per_group =
        matrix.group >= matrix.inner ? shape.blocks : matrix.group / shape.block;
    piece.ahead = ahead;
    piece.dtype = product.dtype;
    piece.scale_dtype = matrix.scale_dtype;
    for (int64_t row = firsts[index / pieces]; row < end; row += most_rows) {
      piece.x = row_of(rounded, row, shape);
      piece.rows = std::min(most_rows, end - row);
      for (int64_t tile = begin; tile < std::min(tiles, begin + step); ++tile) {
        const int64_t place = expert * tiles + tile, column = tile * kIntegerTile;
        piece.values = matrix.values + place * matrix.tile_bytes();
        piece.scales =
            static_cast<const std::byte*>(matrix.scales) + place * scales_per_tile * scale_size;
        if (matrix.zeros != nullptr) piece.zeros = matrix.zeros + place * scales_per_tile;
        if (product.bias != nullptr) {
          piece.bias = static_cast<const std::byte*>(product.bias) +
                       (expert * matrix.columns + column) * size;
        }
        piece.columns = std::min(kIntegerTile, matrix.columns - column);
        for (int64_t r = 0; r < piece.rows; ++r) {
          outputs[r] = out + (order[row + r] * matrix.columns + column) * size;
        }
        (matrix.bits == 8 ? kernels.product8 : kernels.product4)(piece);
      }
    }
  });
}

}  // namespace pipekernels
