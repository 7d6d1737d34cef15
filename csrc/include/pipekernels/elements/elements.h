// Element types, and their conversions to and from the accumulators in which they are reduced.
#pragma once

#include <cstdint>
#include <cstring>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/host_device.h"

namespace pipekernels {

template <class To, class From>
PK_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Elements that are their own accumulators. Integers are summed as unsigned T, since sums wrap
// around, and compared as `Ordered`, which is signed.
template <class T, class Ordered = T>
struct PlainElement {
  using Element = T;
  using Accumulator = T;
  PK_HOST_DEVICE static T widen(T v) { return v; }
  PK_HOST_DEVICE static T narrow(T v) { return v; }
  PK_HOST_DEVICE static bool less(T a, T b) { return Ordered(a) < Ordered(b); }
};

struct Bf16Element {
  using Element = uint16_t;
  using Accumulator = float;
  PK_HOST_DEVICE static float widen(uint16_t v) { return bits_as<float>(uint32_t{v} << 16); }
  PK_HOST_DEVICE static uint16_t narrow(float v) {
    const auto x = bits_as<uint32_t>(v);
    return (v == v ? x + 0x7fff + (x >> 16 & 1) : x | 0x400000) >> 16;
  }
  PK_HOST_DEVICE static bool less(float a, float b) { return a < b; }
};

// NaNs are converted in software, since the hardware's conversions lose their payloads.
struct Fp16Element {
  using Element = uint16_t;
  using Accumulator = float;
  PK_HOST_DEVICE static float widen(uint16_t v) {
    const uint32_t sign = uint32_t{v & 0x8000u} << 16, magnitude = v & 0x7fffu;
    if (magnitude > 0x7c00) return bits_as<float>(sign | 0x7fc00000 | magnitude << 13);
#ifdef __CUDA_ARCH__
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    if (magnitude == 0x7c00) return bits_as<float>(sign | 0x7f800000);
    if (magnitude >= 0x400) return bits_as<float>(sign | ((magnitude << 13) + (112u << 23)));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
    return bits_as<float>(bits_as<uint32_t>(subnormal) | sign);
#endif
  }
  PK_HOST_DEVICE static uint16_t narrow(float v) {
    const auto x = bits_as<uint32_t>(v);
    if (v != v) return (x >> 16 & 0x8000) | (x >> 13 & 0x3ff) | 0x7e00;
#ifdef __CUDA_ARCH__
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
#else
    const uint32_t sign = x >> 16 & 0x8000, magnitude = x & 0x7fffffff;
    if (magnitude >= 143u << 23) return sign | 0x7c00;
    // Adding 0.5 shifts the mantissa to units of 2^-24, and the addition rounds to nearest even.
    const float unsigned_v = bits_as<float>(magnitude);
    if (magnitude < 113u << 23) return sign | (bits_as<uint32_t>(unsigned_v + 0.5f) - (126u << 23));
    return sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
#endif
  }
  PK_HOST_DEVICE static bool less(float a, float b) { return a < b; }
};

// The element type of each dtype that can be reduced.
template <DType dtype>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat64> : PlainElement<double> {};
template <>
struct ElementOf<DType::kFloat32> : PlainElement<float> {};
template <>
struct ElementOf<DType::kFloat16> : Fp16Element {};
template <>
struct ElementOf<DType::kBFloat16> : Bf16Element {};
template <>
struct ElementOf<DType::kInt32> : PlainElement<uint32_t, int32_t> {};
template <>
struct ElementOf<DType::kInt64> : PlainElement<uint64_t, int64_t> {};

// Converts an element to another floating-point type through float32, as Tensor.to() does.
template <class From, class To>
PK_HOST_DEVICE typename To::Element convert_element(typename From::Element v) {
  const auto single = static_cast<float>(From::widen(v));
  return To::narrow(static_cast<typename To::Accumulator>(single));
}

// Calls body(ElementOf<dtype>()) for a floating-point dtype, in host or device code.
template <class Body>
PK_HOST_DEVICE void with_floating_element(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(ElementOf<DType::kFloat64>());
    case DType::kFloat32:
      return body(ElementOf<DType::kFloat32>());
    case DType::kFloat16:
      return body(ElementOf<DType::kFloat16>());
    default:
      return body(ElementOf<DType::kBFloat16>());
  }
}

// Calls body(ElementOf<dtype>()) for a dtype that can be reduced.
template <class Body>
void with_element(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(ElementOf<DType::kFloat64>());
    case DType::kFloat32:
      return body(ElementOf<DType::kFloat32>());
    case DType::kFloat16:
      return body(ElementOf<DType::kFloat16>());
    case DType::kBFloat16:
      return body(ElementOf<DType::kBFloat16>());
    case DType::kInt32:
      return body(ElementOf<DType::kInt32>());
    default:
      return body(ElementOf<DType::kInt64>());
  }
}

}  // namespace pipekernels
