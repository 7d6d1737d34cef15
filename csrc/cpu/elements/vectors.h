// Vectors of kVectorBytes, and conversions of 16-bit floats in them.
//
// Everything here has internal linkage, since it is compiled once per instruction set, which CMake
// says by PIPEKERNELS_ISA and PIPEKERNELS_VECTOR_BYTES.
#pragma once

#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

// The name of what other files call: PIPEKERNELS_FOR_ISA(cast_tables) is cast_tables_avx2.
#define PIPEKERNELS_JOINED(name, isa) name##_##isa
#define PIPEKERNELS_EXPANDED(name, isa) PIPEKERNELS_JOINED(name, isa)
#define PIPEKERNELS_FOR_ISA(name) PIPEKERNELS_EXPANDED(name, PIPEKERNELS_ISA)

namespace pipekernels {
namespace {

constexpr int kVectorBytes = PIPEKERNELS_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

// Reinterprets the bits as another vector type.
template <class To, class From>
To bits(From v) {
  return (To)v;
}

// Replaces every NaN by the one with all bits set. The sum of two NaNs is one of them, depending on
// the order of operands that the compiler chooses in each kernel; this makes results equal.
template <class V>
V canonical_nan(V v) {
  return (V)((decltype(v == v))v | ~(v == v));
}

// ---- 16-bit floats, each in a lane of 32 bits --------------------------------------------------

struct Bf16Format {
  using U = Vector<uint32_t>;
  using F = Vector<float>;
  static F from_high(U x) { return bits<F>(x); }
  static U to_low(F v) {
    const U x = bits<U>(v);
    const U rounded = x + 0x7fff + (x >> 16 & 1);
    return (v == v ? rounded : (x | 0x400000)) >> 16;
  }
  // Rounds a sum to the upper half of each lane; the lower half is undefined.
  static U sum_to_high(F v) {
    const U x = bits<U>(v);
#if defined(__AVX512BW__)
    // Masks need half the instructions, and reductions spend most of their time here.
    const __m512i rounded = bits<__m512i>(x + 0x7fff), all = bits<__m512i>(U{} - 1);
    const __mmask16 odd = _mm512_test_epi32_mask(bits<__m512i>(x), bits<__m512i>(U{} + 0x10000));
    const __m512i even = _mm512_mask_sub_epi32(rounded, odd, rounded, all);
    return bits<U>(_mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), all));
#else
    return (x + 0x7fff + (x >> 16 & 1)) | bits<U>(~(v == v));
#endif
  }
};

// Interleaves the upper halves of `even` and of `odd`.
inline Vector<uint32_t> join_high(Vector<uint32_t> even, Vector<uint32_t> odd) {
#if defined(__AVX512BW__)
  return bits<Vector<uint32_t>>(
      _mm512_mask_blend_epi16(0xaaaaaaaa, bits<__m512i>(even >> 16), bits<__m512i>(odd)));
#else
  return even >> 16 | (odd & 0xffff0000);
#endif
}

#if defined(__F16C__)

#if defined(__AVX512F__)
// All-ones masks avoid GCC 12's false warnings about the unmasked intrinsics.
inline __m512 widen_half(__m256i v) { return _mm512_maskz_cvtph_ps(0xffff, v); }
inline __m256i narrow_half(__m512 v) {
  return _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
}
inline __m256i low_half(__m512i v) { return _mm512_maskz_extracti64x4_epi64(0xf, v, 0); }
inline __m256i high_half(__m512i v) { return _mm512_maskz_extracti64x4_epi64(0xf, v, 1); }
inline __m512i join_halves(__m256i low, __m256i high) {
  return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1);
}
#else
inline __m256 widen_half(__m128i v) { return _mm256_cvtph_ps(v); }
inline __m128i narrow_half(__m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline __m128i low_half(__m256i v) { return _mm256_castsi256_si128(v); }
inline __m128i high_half(__m256i v) { return _mm256_extracti128_si256(v, 1); }
inline __m256i join_halves(__m128i low, __m128i high) { return _mm256_set_m128i(high, low); }
#endif

#else

struct Fp16Format {
  using U = Vector<uint32_t>;
  using F = Vector<float>;
  static constexpr uint32_t kRebias = (127 - 15) << 23;

  static F from_high(U x) {
    const U magnitude = x >> 3 & 0x0fffe000;
    const U normal = magnitude + kRebias;
    const U special = normal + kRebias;  // Infinity and NaN: exponent 255.
    // A subnormal is its mantissa times 2^-24. Its bits added to those of 2^-14 give 2^-14 plus its
    // value; then subtract 2^-14.
    const U offset = U{} + (kRebias + (1u << 23));
    const U subnormal = bits<U>(bits<F>(magnitude + offset) - bits<F>(offset));
    const U finite = magnitude < (1u << 23) ? subnormal : normal;
    return bits<F>((magnitude >= (31u << 23) ? special : finite) | (x & 0x80000000));
  }
  static U to_low(F v) {
    const U x = bits<U>(v);
    const U magnitude = x & 0x7fffffff;
    const U normal = (magnitude - kRebias + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Adding 0.5 shifts the mantissa to units of 2^-24, and the addition rounds to nearest even.
    const U half = U{} + (126u << 23);
    const U subnormal = bits<U>(bits<F>(magnitude) + bits<F>(half)) - half;
    const U finite = magnitude < (113u << 23) ? subnormal : normal;
    const U infinite = U{} + 0x7c00;
    const U nan = (magnitude >> 13 & 0x3ff) | 0x7e00;
    const U special = magnitude > 0x7f800000 ? nan : infinite;
    return (magnitude >= (143u << 23) ? special : finite) | (x >> 16 & 0x8000);
  }
  static U sum_to_high(F v) { return to_low(canonical_nan(v)) << 16; }
};

#endif

}  // namespace
}  // namespace pipekernels
