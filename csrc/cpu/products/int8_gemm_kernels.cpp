// Skinny products with weights of int8 and a float32 scale per row, written once over vectors of
// kVectorBytes and compiled once per instruction set. As in skinny_gemm_kernels.cpp, everything
// else has internal linkage.
//
// A weight is a quarter or half as long as in floats, so the time of an element counts: it is
// widened to float32 in registers, and the scale multiplies the sum. More than two rows at a time
// would need more registers than AVX2 has, so three or four are two passes over a row of the
// weight, the second of which finds it in the cache.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../elements/element_types.h"
#include "skinny_gemm_kernels.h"

namespace pipekernels {
namespace {

using Wide = Vector<float>;
constexpr int kLanes = kVectorBytes / sizeof(float);
// Independent sums hide the latency of an addition; as many for any number of rows.
constexpr int kSums = 4;

Wide load_int8(const int8_t* source) {
#if defined(__AVX512F__)
  __m128i v;
  std::memcpy(&v, source, sizeof(v));
  const __m512i integers = _mm512_maskz_cvtepi8_epi32(0xffff, v);
  return bits<Wide>(_mm512_maskz_cvtepi32_ps(0xffff, integers));
#elif defined(__AVX2__)
  __m128i v{};
  std::memcpy(&v, source, kLanes);
  return bits<Wide>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes v;
  std::memcpy(&v, source, sizeof(v));
  return __builtin_convertvector(v, Wide);
#endif
}

int64_t vectors(int64_t inner) { return (inner + kLanes - 1) / kLanes; }

// The size of a row, filled up with zeros to whole vectors.
size_t widened_bytes(int64_t inner) { return vectors(inner) * sizeof(Wide); }

// Sums of kRows rows of `x`, row_floats apart, times one row of the weight.
template <int kRows>
__attribute__((always_inline)) inline void sum_row(const int8_t* weight, int64_t inner,
                                                   const float* x, int64_t row_floats,
                                                   int64_t ahead, float* results) {
  Wide sums[kSums][kRows];
#pragma GCC unroll 4
  for (int s = 0; s < kSums; ++s) {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) sums[s][r] = Wide{};
  }
  const auto add = [&](int64_t j, Wide v, int s) {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      Wide part;
      std::memcpy(&part, x + r * row_floats + j, sizeof(part));
      sums[s][r] += v * part;
    }
  };
  int64_t j = 0;
  for (; j + kSums * kLanes <= inner; j += kSums * kLanes) {
    __builtin_prefetch(weight + j + ahead, 0, 2);
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) add(j + s * kLanes, load_int8(weight + j + s * kLanes), s);
  }
  for (; j < inner; j += kLanes) {
    int8_t last[kLanes] = {};
    std::memcpy(last, weight + j, inner - j < kLanes ? inner - j : kLanes);
    add(j, load_int8(last), 0);
  }
  for (int r = 0; r < kRows; ++r) {
    const Wide total = (sums[0][r] + sums[1][r]) + (sums[2][r] + sums[3][r]);
    float lanes[kLanes];
    std::memcpy(lanes, &total, sizeof(lanes));
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    results[r] = lanes[0];
  }
}

float widened(float value) { return value; }

float widened(uint16_t value) {
  const uint32_t word = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &word, sizeof(result));
  return result;
}

template <class Type>
struct Int8GemmOf {
  using Element = typename Type::Element;

  static void widen(void* widened_rows, const void* x, int64_t rows, int64_t inner) {
    auto* to = static_cast<float*>(widened_rows);
    const auto* from = static_cast<const Element*>(x);
    const int64_t size = vectors(inner) * kLanes;
    for (int64_t r = 0; r < rows; ++r, to += size, from += inner) {
      for (int64_t j = 0; j < inner; ++j) to[j] = widened(from[j]);
      for (int64_t j = inner; j < size; ++j) to[j] = 0;
    }
  }

  static void store(const SkinnyGemmPiece& piece, int r, int64_t i, float sum) {
    sum *= piece.scales[i];
    if (piece.bias != nullptr) sum += widened(static_cast<const Element*>(piece.bias)[i]);
    const Wide parts[2] = {Wide{} + sum, Wide{}};
    const Element result = Type::narrow(parts)[0];
    std::memcpy(static_cast<Element*>(piece.out[r]) + i, &result, sizeof(result));
  }

  template <int kRows>
  static void product(const SkinnyGemmPiece& piece) {
    const int64_t row_floats = vectors(piece.inner) * kLanes;
    const auto* x = static_cast<const float*>(piece.widened);
    const auto* weight = static_cast<const int8_t*>(piece.weight) + piece.begin * piece.inner;
    for (int64_t i = piece.begin; i < piece.end; ++i, weight += piece.inner) {
      float sums[kRows];
      int r = 0;
      for (; r + 2 <= kRows; r += 2) {
        sum_row<2>(weight, piece.inner, x + r * row_floats, row_floats, piece.ahead, sums + r);
      }
      if (kRows % 2) {
        sum_row<1>(weight, piece.inner, x + r * row_floats, row_floats, piece.ahead, sums + r);
      }
      for (r = 0; r < kRows; ++r) store(piece, r, i, sums[r]);
    }
  }

  static constexpr SkinnyGemmKernels kKernels = {
      &widened_bytes, &widen, {&product<1>, &product<2>, &product<3>, &product<4>}, {}, {}};
};

// By DType of `x`; null for those that are not supported.
constexpr const SkinnyGemmKernels* kTables[kFloatingDTypes] = {
    nullptr,
    &Int8GemmOf<Plain<float>>::kKernels,
    nullptr,
    &Int8GemmOf<Bf16>::kKernels,
};

}  // namespace

const SkinnyGemmKernels* const* PIPEKERNELS_FOR_ISA(int8_gemm_tables)() { return kTables; }

}  // namespace pipekernels
