// Element types, each with a wider type in which it is computed with.
//
// Everything here has internal linkage, since it is compiled once per instruction set.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace pipekernels {
namespace {

// A vector of elements widens to kParts vectors of accumulators, in an order that the type chooses.
// narrow_sum(v) is narrow(canonical_nan(v)).

template <class T>
struct Plain {
  using Element = T;
  using Accumulator = T;
  static constexpr int kParts = 1;
  static void widen(Vector<T> v, Vector<T>* parts) { parts[0] = v; }
  static Vector<T> narrow(const Vector<T>* parts) { return parts[0]; }
  static Vector<T> narrow_sum(const Vector<T>* parts) { return canonical_nan(parts[0]); }
};

// 16-bit floats without conversion instructions: even elements in one part, odd ones in the other.
template <class Format>
struct EvenOdd {
  using Element = uint16_t;
  using Accumulator = float;
  static constexpr int kParts = 2;
  using U = Vector<uint32_t>;
  static void widen(Vector<uint16_t> v, Vector<float>* parts) {
    const U pairs = bits<U>(v);
    parts[0] = Format::from_high(pairs << 16);
    parts[1] = Format::from_high(pairs & 0xffff0000);
  }
  static Vector<uint16_t> narrow(const Vector<float>* parts) {
    return bits<Vector<uint16_t>>(Format::to_low(parts[0]) | Format::to_low(parts[1]) << 16);
  }
  static Vector<uint16_t> narrow_sum(const Vector<float>* parts) {
    return bits<Vector<uint16_t>>(
        join_high(Format::sum_to_high(parts[0]), Format::sum_to_high(parts[1])));
  }
};

#if defined(__AVX512BF16__)

struct Bf16 : EvenOdd<Bf16Format> {
  // Uses the conversion instruction, except for vectors with a subnormal, which the instruction
  // flushes to zero, or a NaN, which it does not turn into canonical_nan().
  static Vector<uint16_t> narrow_sum(const Vector<float>* parts) {
    constexpr int kSubnormalOrNan = 0x20 | 0x80 | 0x01;
    if (!_kortestz_mask16_u8(_mm512_fpclass_ps_mask(parts[0], kSubnormalOrNan),
                             _mm512_fpclass_ps_mask(parts[1], kSubnormalOrNan))) {
      return EvenOdd::narrow_sum(parts);
    }
    const Vector<uint16_t> alternating = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                          21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                          11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const auto even_then_odd = bits<__m512i>(_mm512_cvtne2ps_pbh(parts[1], parts[0]));
    return bits<Vector<uint16_t>>(
        _mm512_permutexvar_epi16(bits<__m512i>(alternating), even_then_odd));
  }
};

#else

using Bf16 = EvenOdd<Bf16Format>;

#endif

#if defined(__F16C__)

struct Fp16 {
  using Element = uint16_t;
  using Accumulator = float;
  static constexpr int kParts = 2;
  static void widen(Vector<uint16_t> v, Vector<float>* parts) {
    parts[0] = widen_half(low_half(bits<Vector<long long>>(v)));
    parts[1] = widen_half(high_half(bits<Vector<long long>>(v)));
  }
  static Vector<uint16_t> narrow(const Vector<float>* parts) {
    return bits<Vector<uint16_t>>(join_halves(narrow_half(parts[0]), narrow_half(parts[1])));
  }
  static Vector<uint16_t> narrow_sum(const Vector<float>* parts) {
    const Vector<float> sums[kParts] = {canonical_nan(parts[0]), canonical_nan(parts[1])};
    return narrow(sums);
  }
};

#else

using Fp16 = EvenOdd<Fp16Format>;

#endif

}  // namespace
}  // namespace pipekernels
