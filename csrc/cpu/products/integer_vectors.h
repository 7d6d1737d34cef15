// Vectors of integer products, for each instruction set, and the elements around them.
//
// A lane is a column. So the four products of a quad are added within a lane, and a block ends
// without a sum over lanes. As in vectors.h, everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "../elements/vectors.h"
#include "integer_product_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pipekernels {
namespace {

constexpr int kStep = kIntegerStep, kTile = kIntegerTile, kQuads = kStep / 4;
constexpr int kQuadBytes = 4 * kTile;  // of all columns of a tile

// Not std::min, of which the linker may keep this instruction set's copy.
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Of scalars, which bits() of vectors.h would convert.
template <class To, class From>
To reinterpreted(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Adds the products of a step to the sums of kRows rows, whose values are `bytes` apart.
template <int kBits, int kRows>
struct StepProducts;

// ---- a tile's columns ---------------------------------------------------------------------------
// Integers, Floats: int32 and float32 of 16 columns. Bytes: a quad of each.
//
//    add_products(sums, weights, x)    sums + the four products of each column; kSignedBytes: with
//                                      weights - 128, if they have 8 bits
//    add_block(total, sums, s)         total + sums * s, rounded once
#if defined(__AVX512VNNI__)

constexpr int kMostRows = 8;
constexpr bool kSignedBytes = false;
constexpr __mmask16 kAll = 0xffff;  // GCC warns of intrinsics without masks (bug 105593).
using Integers = __m512i;
using Floats = __m512;
using Bytes = __m512i;

inline Integers all(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Bytes load(const uint8_t* source) { return _mm512_loadu_si512(source); }
inline Bytes low(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Bytes high(Bytes v) { return low(_mm512_maskz_srli_epi32(kAll, v, 4)); }

template <int kBits>
inline Integers add_products(Integers sums, Bytes weights, int32_t x) {
  return _mm512_dpbusd_epi32(sums, weights, all(x));
}

inline Integers zeros_times(const uint8_t* zeros, int32_t offset, int32_t factor) {
  __m128i v;
  std::memcpy(&v, zeros, sizeof(v));
  const __m512i wide = _mm512_sub_epi32(_mm512_maskz_cvtepu8_epi32(kAll, v), all(offset));
  return _mm512_mullo_epi32(wide, all(factor));
}

inline Floats load_floats(const float* source) { return _mm512_loadu_ps(source); }
inline Floats load_halves(const uint16_t* source) {
  __m256i v;
  std::memcpy(&v, source, sizeof(v));
  return _mm512_maskz_cvtph_ps(kAll, v);
}
inline Floats times(Floats v, float factor) { return _mm512_mul_ps(v, _mm512_set1_ps(factor)); }
inline Floats add_block(Floats total, Integers sums, Floats scales) {
  return _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(kAll, sums), scales, total);
}
inline void store(float* to, Floats v) { _mm512_storeu_ps(to, v); }

#elif defined(__AVX2__)

struct Integers {
  __m256i parts[2];
};
struct Floats {
  __m256 parts[2];
};
using Bytes = Integers;

// Applies `function` to both halves.
template <class Result, class Function>
inline Result halves(const Function& function) {
  return Result{{function(0), function(1)}};
}

inline Integers all(int32_t value) {
  return halves<Integers>([&](int) { return _mm256_set1_epi32(value); });
}
inline Floats no_floats() {
  return halves<Floats>([](int) { return _mm256_setzero_ps(); });
}
inline Bytes load(const uint8_t* source) {
  return halves<Bytes>([&](int h) {
    __m256i v;
    std::memcpy(&v, source + 32 * h, sizeof(v));
    return v;
  });
}
inline Bytes low(const Bytes& v) {
  return halves<Bytes>([&](int h) { return _mm256_and_si256(v.parts[h], _mm256_set1_epi8(15)); });
}
inline Bytes high(const Bytes& v) {
  return low(halves<Bytes>([&](int h) { return _mm256_srli_epi16(v.parts[h], 4); }));
}

#if defined(__AVXVNNI__)

constexpr int kMostRows = 2;
constexpr bool kSignedBytes = false;

template <int kBits>
inline Integers add_products(const Integers& sums, const Bytes& weights, int32_t x) {
  return halves<Integers>([&](int h) {
    return _mm256_dpbusd_avx_epi32(sums.parts[h], weights.parts[h], _mm256_set1_epi32(x));
  });
}

#else

// maddubs adds two products in 16 bits with saturation: 2 * 128 * 127 fits, 2 * 255 * 127 would
// not.
constexpr bool kSignedBytes = true;
constexpr int kMostRows = 4;

template <int kBits>
inline Integers add_products(const Integers& sums, const Bytes& weights, int32_t x) {
  return halves<Integers>([&](int h) {
    __m256i unsigned_bytes = weights.parts[h], signed_bytes = _mm256_set1_epi32(x);
    if constexpr (kBits == 8) {
      const __m256i centered = _mm256_xor_si256(unsigned_bytes, _mm256_set1_epi8(-128));
      unsigned_bytes = _mm256_abs_epi8(centered);
      signed_bytes = _mm256_sign_epi8(signed_bytes, centered);
    }
    const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(sums.parts[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  });
}

// 16 bits hold all sums of a step of 4 bits: 16 * 15 * 127 is below 2^15.
template <int kRows>
struct StepProducts<4, kRows> {
  static void add(Integers* sums, const uint8_t* weights, const int8_t* x, int64_t bytes) {
    Integers pairs[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) pairs[r] = all(0);
    const auto add_quad = [&](const Bytes& quad, int q) {
      const int8_t* row = x + 4 * q;
      // Else GCC keeps what it reads from x on the stack, and adds in an order with more sums.
      __asm__("" : "+r"(row));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r, row += bytes) {
        int32_t four;
        std::memcpy(&four, row, sizeof(four));
        const __m256i quads = _mm256_set1_epi32(four);
        for (int h = 0; h < 2; ++h) {
          __m256i& sum = pairs[r].parts[h];
          sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(quad.parts[h], quads));
          __asm__("" : "+x"(sum));
        }
      }
    };
#pragma GCC unroll 8
    for (int q = 0; q < kQuads / 2; ++q) {
      const Bytes quads = load(weights + q * kQuadBytes);
      add_quad(low(quads), q);
      add_quad(high(quads), q + kQuads / 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = halves<Integers>([&](int h) {
        const __m256i wide = _mm256_madd_epi16(pairs[r].parts[h], _mm256_set1_epi16(1));
        return _mm256_add_epi32(sums[r].parts[h], wide);
      });
    }
  }
};

#endif

inline Integers zeros_times(const uint8_t* zeros, int32_t offset, int32_t factor) {
  return halves<Integers>([&](int h) {
    __m128i v{};
    std::memcpy(&v, zeros + 8 * h, 8);
    const __m256i wide = _mm256_sub_epi32(_mm256_cvtepu8_epi32(v), _mm256_set1_epi32(offset));
    return _mm256_mullo_epi32(wide, _mm256_set1_epi32(factor));
  });
}

inline Floats load_floats(const float* source) {
  return halves<Floats>([&](int h) { return _mm256_loadu_ps(source + 8 * h); });
}
inline Floats load_halves(const uint16_t* source) {
  return halves<Floats>([&](int h) {
    __m128i v;
    std::memcpy(&v, source + 8 * h, sizeof(v));
    return _mm256_cvtph_ps(v);
  });
}
inline Floats times(const Floats& v, float factor) {
  return halves<Floats>([&](int h) { return _mm256_mul_ps(v.parts[h], _mm256_set1_ps(factor)); });
}
inline Floats add_block(const Floats& total, const Integers& sums, const Floats& scales) {
  return halves<Floats>([&](int h) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums.parts[h]), scales.parts[h], total.parts[h]);
  });
}
inline void store(float* to, const Floats& v) {
  for (int h = 0; h < 2; ++h) _mm256_storeu_ps(to + 8 * h, v.parts[h]);
}

#else

constexpr int kMostRows = 1;
constexpr bool kSignedBytes = false;
struct Integers {
  int32_t lanes[kTile];
};
struct Floats {
  float lanes[kTile];
};
struct Bytes {
  uint8_t lanes[kQuadBytes];
};

template <class Result, class Function>
inline Result each(const Function& function) {
  Result result;
  for (int i = 0; i < static_cast<int>(sizeof(result.lanes) / sizeof(result.lanes[0])); ++i) {
    result.lanes[i] = function(i);
  }
  return result;
}

inline Integers all(int32_t value) {
  return each<Integers>([&](int) { return value; });
}
inline Floats no_floats() { return Floats{}; }
inline Bytes load(const uint8_t* source) {
  return each<Bytes>([&](int i) { return source[i]; });
}
inline Bytes low(const Bytes& v) {
  return each<Bytes>([&](int i) { return v.lanes[i] & 15; });
}
inline Bytes high(const Bytes& v) {
  return each<Bytes>([&](int i) { return v.lanes[i] >> 4; });
}

template <int kBits>
inline Integers add_products(const Integers& sums, const Bytes& weights, int32_t x) {
  int8_t quad[4];
  std::memcpy(quad, &x, sizeof(quad));
  return each<Integers>([&](int i) {
    int32_t sum = sums.lanes[i];
    for (int j = 0; j < 4; ++j) sum += weights.lanes[4 * i + j] * quad[j];
    return sum;
  });
}

inline Integers zeros_times(const uint8_t* zeros, int32_t offset, int32_t factor) {
  return each<Integers>([&](int i) { return (zeros[i] - offset) * factor; });
}

inline Floats load_floats(const float* source) {
  return each<Floats>([&](int i) { return source[i]; });
}

// Subnormal numbers too: the exponent of float32 reaches further down.
inline float half_to_float(uint16_t value) {
  const uint32_t magnitude = value & 0x7fff, sign = (value & 0x8000u) << 16;
  if (magnitude >= 0x7c00)
    return reinterpreted<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {
    const float result = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -result : result;
  }
  return reinterpreted<float>(sign | ((magnitude << 13) + (112u << 23)));
}

inline Floats load_halves(const uint16_t* source) {
  return each<Floats>([&](int i) { return half_to_float(source[i]); });
}
inline Floats times(const Floats& v, float factor) {
  return each<Floats>([&](int i) { return v.lanes[i] * factor; });
}
inline Floats add_block(const Floats& total, const Integers& sums, const Floats& scales) {
  return each<Floats>([&](int i) {
    return __builtin_fmaf(static_cast<float>(sums.lanes[i]), scales.lanes[i], total.lanes[i]);
  });
}
inline void store(float* to, const Floats& v) { std::memcpy(to, &v, sizeof(v)); }

#endif

template <int kBits, int kRows>
struct StepProducts {
  static void add(Integers* sums, const uint8_t* weights, const int8_t* x, int64_t bytes) {
    const auto add_quad = [&](const Bytes& quad, int q) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * bytes + 4 * q, sizeof(four));
        sums[r] = add_products<kBits>(sums[r], quad, four);
      }
    };
#pragma GCC unroll 8
    for (int q = 0; q < kQuads * kBits / 8; ++q) {
      const Bytes quads = load(weights + q * kQuadBytes);
      if constexpr (kBits == 8) {
        add_quad(quads, q);
      } else {
        add_quad(low(quads), q);
        add_quad(high(quads), q + kQuads / 2);
      }
    }
  }
};

// ---- elements -----------------------------------------------------------------------------------

float from_bfloat16(uint16_t value) { return reinterpreted<float>(uint32_t{value} << 16); }

uint16_t to_bfloat16(float value) {
  const uint32_t word = reinterpreted<uint32_t>(value);
  if ((word & 0x7fffffff) > 0x7f800000) return word >> 16 | 0x40;
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

Floats load_scales(const void* scales, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return load_floats(static_cast<const float*>(scales) + index);
  const auto* const words = static_cast<const uint16_t*>(scales) + index;
  if (dtype == DType::kFloat16) return load_halves(words);
  float wide[kTile];
  for (int i = 0; i < kTile; ++i) wide[i] = from_bfloat16(words[i]);
  return load_floats(wide);
}

float widened(float value) { return value; }
float widened(uint16_t value) { return from_bfloat16(value); }
void narrow(float value, float& to) { to = value; }
void narrow(float value, uint16_t& to) { to = to_bfloat16(value); }

template <class T>
void store_columns_as(const IntegerPiece& piece, T* out, const float* sums) {
  const auto* const bias = static_cast<const T*>(piece.bias);
  float biases[kTile] = {};
  for (int64_t i = 0; bias != nullptr && i < piece.columns; ++i) biases[i] = widened(bias[i]);
  T values[kTile];
  for (int i = 0; i < kTile; ++i) narrow(sums[i] + biases[i], values[i]);
  if (piece.columns == kTile) {
    std::memcpy(out, values, sizeof(values));
  } else {
    std::memcpy(out, values, piece.columns * sizeof(T));
  }
}

void store_columns(const IntegerPiece& piece, int64_t row, const float* sums) {
  if (piece.dtype == DType::kFloat32) {
    store_columns_as(piece, static_cast<float*>(piece.out[row]), sums);
  } else {
    store_columns_as(piece, static_cast<uint16_t*>(piece.out[row]), sums);
  }
}

}  // namespace
}  // namespace pipekernels
