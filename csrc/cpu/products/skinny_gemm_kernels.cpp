// The kernels of skinny_gemm.h, written once over vectors of kVectorBytes and compiled once per
// instruction set. As in reduce_kernels.cpp, everything else has internal linkage and uses no
// inline function of other headers.
#include "skinny_gemm_kernels.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../elements/element_types.h"

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

// Adds terms 0, 1, ... 2^n - 1 of each row in a balanced binary tree: ((0 + 1) + (2 + 3)) + ...
template <class T, int kRows>
class TreeSum {
 public:
  // Replaces term `index` by the sum of the largest subtree that ends with it: of all terms, after
  // the last one.
  void add(int64_t index, T* terms) {
    int height = 0;
    for (; index & 1; index >>= 1, ++height) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) terms[r] = lefts_[height][r] + terms[r];
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) lefts_[height][r] = terms[r];
  }

 private:
  T lefts_[63][kRows];  // Of each height, the subtree that waits for its right neighbour.
};

// One row of `x` is widened into whole vectors, in the order in which Type::widen() puts the
// elements of a row of the weight. The last vectors are filled up with zeros.
template <class Type>
struct SkinnyGemmOf {
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

  using Bits = Vector<long long>;

  // All ones in the elements of a slab's last vector, or zeros if that is whole.
  static Bits last_mask(int64_t inner) {
    Bits mask{};
    std::memset(&mask, 0xff, inner % kElements * sizeof(Element));
    return mask;
  }

  // Loads the last `count` < kElements elements of a slab, within memory that ends at `end`.
  // Copying that many takes longer than clearing what lies behind them.
  static void load_last(const Element* source, int64_t count, const Element* end, Bits mask,
                        Wide* parts) {
    if (end - source < kElements) return load(source, count, parts);
    Bits v;
    std::memcpy(&v, source, sizeof(v));
    Type::widen(bits<Vector<Element>>(v & mask), parts);
  }

  // Sums over one slab of a row of the weight, for kRows rows of `x` that lie row_bytes apart. The
  // loops are unrolled, so that all sums stay in registers.
  template <int kRows>
  __attribute__((always_inline)) static void sum_slab(const Element* slab, int64_t inner,
                                                      const Element* end, Bits mask,
                                                      const std::byte* x, size_t row_bytes,
                                                      int64_t ahead, Accumulator* results) {
    Wide sums[kSteps][kRows][kParts];  // An initializer would be a slow call or string instruction.
#pragma GCC unroll 2
    for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p) sums[s][r][p] = Wide{};
      }
    }
    // Adds the products of the vector of the slab that starts at element j.
    const auto add = [&](int64_t j, const Wide* weight, int s) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p) {
          Wide part;
          const int64_t widened = j * sizeof(Accumulator) + p * sizeof(Wide);
          std::memcpy(&part, x + r * row_bytes + widened, sizeof(part));
          sums[s][r][p] += weight[p] * part;
        }
      }
    };
    Wide weight[kParts];
    int64_t j = 0;
    for (; j + kSteps * kElements <= inner; j += kSteps * kElements) {
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; ++s) {
        const Element* const source = slab + j + s * kElements;
        __builtin_prefetch(reinterpret_cast<const char*>(source) + ahead, 0, 2);
        load(source, kElements, weight);
        add(j + s * kElements, weight, s);
      }
    }
    if (kSteps > 1 && j + kElements <= inner) {
      load(slab + j, kElements, weight);
      add(j, weight, 0);
      j += kElements;
    }
    if (j < inner) {
      load_last(slab + j, inner - j, end, mask, weight);
      add(j, weight, 0);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Wide total{};
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p) total += sums[s][r][p];
      }
      results[r] = sum_of_lanes<Accumulator, sizeof(Wide)>(total);
    }
  }

  // Columns of the product for kRows rows. A whole product has one slab.
  template <int kRows, bool kPartial>
  static void product(const SkinnyGemmPiece& piece) {
    const int64_t slabs = kPartial ? piece.slabs : 1, inner = piece.inner / slabs;
    const size_t slab_bytes = widened_bytes(inner), row_bytes = slabs * slab_bytes;
    const auto* const weight = static_cast<const Element*>(piece.weight);
    const Element* const end = weight + piece.columns * piece.inner;
    const Bits mask = last_mask(inner);
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      const Element* row = weight + i * piece.inner;
      const auto* x = static_cast<const std::byte*>(piece.widened);
      Accumulator sums[kRows];
      [[maybe_unused]] TreeSum<Accumulator, kRows> tree;
      int64_t slab = 0;
      do {
        sum_slab<kRows>(row, inner, end, mask, x, row_bytes, piece.ahead, sums);
        if constexpr (kPartial) tree.add(slab, sums);
        row += inner;
        x += slab_bytes;
      } while (kPartial && ++slab < slabs);
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kPartial) {
          store_partial(piece, r, i, sums[r]);
        } else {
          store(piece, r, i, sums[r]);
        }
      }
    }
  }

  static void store_partial(const SkinnyGemmPiece& piece, int r, int64_t i, Accumulator sum) {
    const Accumulator result = canonical_nan(Wide{} + sum)[0];
    std::memcpy(static_cast<Accumulator*>(piece.out[r]) + i, &result, sizeof(result));
  }

  static void store(const SkinnyGemmPiece& piece, int r, int64_t i, Accumulator sum) {
    if (piece.bias != nullptr) {
      Wide bias[kParts];
      load(static_cast<const Element*>(piece.bias) + i, 1, bias);
      sum += bias[0][0];
    }
    const Wide parts[2] = {Wide{} + sum, Wide{}};
    const Element result = Type::narrow(parts)[0];
    std::memcpy(static_cast<Element*>(piece.out[r]) + i, &result, sizeof(result));
  }

  // Columns of the product with a transposed weight for kRows rows. The sums of kTransposedColumns
  // stay in the first cache while the rows of the weight pass by.
  template <int kRows>
  static void transposed_product(const SkinnyGemmPiece& piece) {
    constexpr int64_t kVectors = kTransposedColumns / kElements;
    const auto* const x = static_cast<const Element*>(piece.widened);
    for (int64_t begin = piece.begin; begin < piece.end; begin += kTransposedColumns) {
      const int64_t left = piece.end - begin;
      const int64_t columns = left < kTransposedColumns ? left : kTransposedColumns;
      const int64_t whole = columns / kElements, rest = columns % kElements;
      const int64_t vectors = whole + (rest > 0);
      Wide sums[kVectors][kRows][kParts];
      for (int64_t v = 0; v < vectors; ++v) {
        for (auto& row : sums[v]) {
          for (auto& part : row) part = Wide{};
        }
      }
      for (int64_t j = 0; j < piece.inner; ++j) {
        const auto* const row =
            static_cast<const Element*>(piece.weight) + j * piece.columns + begin;
        Wide factors[kRows];
        for (int r = 0; r < kRows; ++r) {
          Wide parts[kParts];
          load(x + r * piece.inner + j, 1, parts);
          factors[r] = Wide{} + parts[0][0];
        }
        const auto add = [&](int64_t v, const Wide* weight) {
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int p = 0; p < kParts; ++p) sums[v][r][p] += weight[p] * factors[r];
          }
        };
        Wide weight[kParts];
        for (int64_t v = 0; v < whole; ++v) {
          load(row + v * kElements, kElements, weight);
          add(v, weight);
        }
        if (rest > 0) {
          load(row + whole * kElements, rest, weight);
          add(whole, weight);
        }
      }
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t start = begin + v * kElements, count = v < whole ? kElements : rest;
        Wide bias[kParts] = {};
        if (piece.bias != nullptr) {
          load(static_cast<const Element*>(piece.bias) + start, count, bias);
        }
        for (int r = 0; r < kRows; ++r) {
          for (int p = 0; p < kParts; ++p) {
            if (piece.bias != nullptr) sums[v][r][p] += bias[p];
          }
          const Vector<Element> result = Type::narrow(sums[v][r]);
          std::memcpy(static_cast<Element*>(piece.out[r]) + start, &result,
                      count * sizeof(Element));
        }
      }
    }
  }

  static constexpr SkinnyGemmKernels kKernels = {
      &widened_bytes,
      &widen,
      {&product<1, false>, &product<2, false>, &product<3, false>, &product<4, false>},
      {&product<1, true>, &product<2, true>, &product<3, true>, &product<4, true>},
      {&transposed_product<1>, &transposed_product<2>, &transposed_product<3>,
       &transposed_product<4>},
  };
};

// By DType.
constexpr const SkinnyGemmKernels* kTables[kFloatingDTypes] = {
    &SkinnyGemmOf<Plain<double>>::kKernels,
    &SkinnyGemmOf<Plain<float>>::kKernels,
    &SkinnyGemmOf<Fp16>::kKernels,
    &SkinnyGemmOf<Bf16>::kKernels,
};

}  // namespace

const SkinnyGemmKernels* const* PIPEKERNELS_FOR_ISA(skinny_gemm_tables)() { return kTables; }

}  // namespace pipekernels
