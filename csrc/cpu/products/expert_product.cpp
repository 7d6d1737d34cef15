#include "pipekernels/products/expert_product.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "pipekernels/host/parallel_for.h"
#include "skinny_gemm_kernels.h"

namespace pipekernels {

static void check(const ExpertProduct& product) {
  if (!is_floating(product.dtype)) {
    throw std::invalid_argument(std::string("a product with experts takes floats, got ") +
                                name_of(product.dtype));
  }
  if (product.rows < 1 || product.pairs % product.rows != 0) {
    throw std::invalid_argument("the number of rows, " + std::to_string(product.rows) +
                                ", must divide the number of chosen experts, " +
                                std::to_string(product.pairs));
  }
  for (int64_t p = 0; p < product.pairs; ++p) {
    if (product.chosen[p] < 0 || product.chosen[p] >= product.experts) {
      throw std::invalid_argument("an expert must be in 0.." + std::to_string(product.experts - 1) +
                                  ", got " + std::to_string(product.chosen[p]));
    }
  }
}

void expert_product(const ExpertProduct& product, int threads, Isa isa) {
  check(product);
  const SkinnyGemmKernels& table = skinny_gemm_kernels(product.dtype, isa);
  const size_t row_bytes = table.widened_bytes(product.inner), size = size_of(product.dtype);
  const auto at = [&](const void* base, int64_t elements) {
    return static_cast<const std::byte*>(base) + elements * size;
  };

  // Pairs of the same expert follow each other; up to kMaxSkinnyRows of them are one product.
  std::vector<int64_t> order(product.pairs);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return product.chosen[a] < product.chosen[b]; });
  auto* const widened = static_cast<std::byte*>(kept_cache_lines(row_bytes * product.pairs));
  const int64_t pairs_per_row = product.pairs / product.rows;
  std::vector<int64_t> firsts;
  for (int64_t i = 0; i < product.pairs; ++i) {
    table.widen(widened + i * row_bytes, at(product.x, order[i] / pairs_per_row * product.inner), 1,
                product.inner);
    if (i == 0 || product.chosen[order[i]] != product.chosen[order[firsts.back()]] ||
        i - firsts.back() == kMaxSkinnyRows) {
      firsts.push_back(i);
    }
  }
  const int64_t groups = firsts.size();
  firsts.push_back(product.pairs);

  const int64_t step = columns_per_piece(product.inner * size);
  const int64_t ahead = prefetch_ahead(size);
  const int64_t pieces = (product.columns + step - 1) / step;
  parallel_for(groups * pieces, threads, [&](int64_t index) {
    const int64_t group = index / pieces, first = firsts[group];
    const int64_t rows = firsts[group + 1] - first, expert = product.chosen[order[first]];
    SkinnyGemmPiece piece{};
    for (int64_t r = 0; r < rows; ++r) {
      piece.out[r] = const_cast<std::byte*>(at(product.out, order[first + r] * product.columns));
    }
    piece.widened = widened + first * row_bytes;
    piece.weight = at(product.weight, expert * product.columns * product.inner);
    if (product.bias != nullptr) piece.bias = at(product.bias, expert * product.columns);
    piece.columns = product.columns;
    piece.inner = product.inner;
    piece.slabs = 1;
    piece.ahead = ahead;
    piece.begin = index % pieces * step;
    piece.end = std::min(product.columns, piece.begin + step);
    table.products[rows - 1](piece);
  });
}

}  // namespace pipekernels
