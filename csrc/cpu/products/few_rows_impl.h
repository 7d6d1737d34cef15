// The kernels of few_rows.h, written once over vectors of kVectorBytes and compiled once per
// instruction set by few_rows_{baseline,avx2,avx512}.cpp. As in reduce_impl.h, everything has
// internal linkage and uses no inline function of other headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../elements/element_types.h"
#include "few_rows_kernels.h"

namespace pipekernels {
namespace {

// Adds halves, then quarters and so on: a chain of all lanes would take as long as a row of a
// hundred vectors.
template <class T, size_t kBytes, class V>
T sum_of_lanes(V lanes) {
  if constexpr (kBytes == sizeof(T)) {
    return lanes[0];
  } else {
    typedef T Half __attribute__((vector_size(kBytes / 2)));
    Half halves[2];
    std::memcpy(halves, &lanes, sizeof(halves));
    return sum_of_lanes<T, kBytes / 2>(halves[0] + halves[1]);
  }
}

// One row of `x` is widened into whole vectors, in the order in which Type::widen() puts the
// elements of a row of the weight. The last vectors are filled up with zeros.
template <class Type>
struct FewRowsOf {
  using Element = typename Type::Element;
  using Accumulator = typename Type::Accumulator;
  using Wide = Vector<Accumulator>;
  static constexpr int kParts = Type::kParts;
  static constexpr int64_t kElements = kVectorBytes / sizeof(Element);
  // Two independent sums hide the latency of an addition. As many for any number of rows, since
  // the order of a row's sum depends on it.
  static constexpr int kSteps = 2 / kParts;

  static int64_t vectors(int64_t inner) { return (inner + kElements - 1) / kElements; }

  static size_t widened_bytes(int64_t inner) { return vectors(inner) * kParts * sizeof(Wide); }

  // Loads `count` <= kElements elements.
  static void load(const Element* source, int64_t count, Wide* parts) {
    Vector<Element> v{};
    std::memcpy(&v, source, count * sizeof(Element));
    Type::widen(v, parts);
  }

  static void widen(void* widened, const void* x, int64_t rows, int64_t inner) {
    auto* to = static_cast<std::byte*>(widened);
    for (int64_t r = 0; r < rows; ++r) {
      const Element* row = static_cast<const Element*>(x) + r * inner;
      for (int64_t j = 0; j < inner; j += kElements) {
        Wide parts[kParts];
        load(row + j, inner - j < kElements ? inner - j : kElements, parts);
        std::memcpy(to, parts, sizeof(parts));
        to += sizeof(parts);
      }
    }
  }

  // Columns of the product for kRows rows. Its loops are unrolled, so that all sums stay in
  // registers.
  template <int kRows>
  static void product(const FewRowsPiece& piece) {
    const size_t row_bytes = widened_bytes(piece.inner);
    const auto* const x = static_cast<const std::byte*>(piece.widened);
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      const Element* const row = static_cast<const Element*>(piece.weight) + i * piece.inner;
      Wide sums[kSteps][kRows][kParts] = {};
      // Adds the products of one vector of the row of the weight.
      const auto add = [&](int64_t v, int64_t count, int s) {
        Wide weight[kParts];
        load(row + v * kElements, count, weight);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int p = 0; p < kParts; ++p) {
            Wide part;
            std::memcpy(&part, x + r * row_bytes + (v * kParts + p) * sizeof(Wide), sizeof(part));
            sums[s][r][p] += weight[p] * part;
          }
        }
      };
      int64_t v = 0;
      for (; (v + kSteps) * kElements <= piece.inner; v += kSteps) {
#pragma GCC unroll 2
        for (int s = 0; s < kSteps; ++s) add(v + s, kElements, s);
      }
      for (; v * kElements < piece.inner; ++v) {
        const int64_t left = piece.inner - v * kElements;
        add(v, left < kElements ? left : kElements, 0);
      }
      for (int r = 0; r < kRows; ++r) {
        Wide total{};
#pragma GCC unroll 2
        for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 2
          for (int p = 0; p < kParts; ++p) total += sums[s][r][p];
        }
        store(piece, r, i, total);
      }
    }
  }

  static void store(const FewRowsPiece& piece, int r, int64_t i, Wide total) {
    Accumulator sum = sum_of_lanes<Accumulator, sizeof(Wide)>(total);
    if (piece.bias != nullptr) {
      Wide bias[kParts];
      load(static_cast<const Element*>(piece.bias) + i, 1, bias);
      sum += bias[0][0];
    }
    const Wide parts[2] = {Wide{} + sum, Wide{}};
    const Element result = Type::narrow(parts)[0];
    std::memcpy(static_cast<Element*>(piece.out) + r * piece.columns + i, &result, sizeof(result));
  }

  static constexpr FewRowsKernels kKernels = {
      &widened_bytes,
      &widen,
      {&product<1>, &product<2>, &product<3>, &product<4>},
  };
};

// By DType.
constexpr const FewRowsKernels* kTables[kFloatingDTypes] = {
    &FewRowsOf<Plain<double>>::kKernels,
    &FewRowsOf<Plain<float>>::kKernels,
    &FewRowsOf<Fp16>::kKernels,
    &FewRowsOf<Bf16>::kKernels,
};

}  // namespace
}  // namespace pipekernels
