// Copies and reductions by the threads of a block, 16 bytes at a time. The bits are those of
// reduce.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pipekernels/dtype.h"
#include "pipekernels/host_device.h"

namespace pipekernels {

struct alignas(16) Pack {
  uint32_t words[4];
};

// The largest power of two up to 16 that divides an address.
PK_HOST_DEVICE inline int alignment_of(const void* pointer) {
  const auto address = static_cast<unsigned>(reinterpret_cast<uintptr_t>(pointer)) | 16;
  return static_cast<int>(address & (0 - address));
}

// 16 bytes in units that `Unit` is aligned for.
template <class Unit>
PK_HOST_DEVICE Pack load_units(const std::byte* from) {
  Unit units[16 / sizeof(Unit)];
  PK_UNROLL
  for (size_t i = 0; i < 16 / sizeof(Unit); ++i) {
#ifdef __CUDA_ARCH__
    units[i] = reinterpret_cast<const Unit*>(from)[i];
#else
    std::memcpy(&units[i], from + i * sizeof(Unit), sizeof(Unit));
#endif
  }
  Pack pack;
  memcpy(&pack, units, 16);
  return pack;
}

template <class Unit>
PK_HOST_DEVICE void store_units(std::byte* to, const Pack& pack) {
  Unit units[16 / sizeof(Unit)];
  memcpy(units, &pack, 16);
  PK_UNROLL
  for (size_t i = 0; i < 16 / sizeof(Unit); ++i) {
#ifdef __CUDA_ARCH__
    reinterpret_cast<Unit*>(to)[i] = units[i];
#else
    std::memcpy(to + i * sizeof(Unit), &units[i], sizeof(Unit));
#endif
  }
}

#ifdef __CUDA_ARCH__
using Unit128 = uint4;
#else
using Unit128 = Pack;
#endif

PK_HOST_DEVICE inline Pack load_pack(const std::byte* from, int alignment) {
  if (alignment == 16) return load_units<Unit128>(from);
  if (alignment == 8) return load_units<uint64_t>(from);
  if (alignment == 4) return load_units<uint32_t>(from);
  if (alignment == 2) return load_units<uint16_t>(from);
  return load_units<uint8_t>(from);
}

PK_HOST_DEVICE inline void store_pack(std::byte* to, const Pack& pack, int alignment) {
  if (alignment == 16) return store_units<Unit128>(to, pack);
  if (alignment == 8) return store_units<uint64_t>(to, pack);
  if (alignment == 4) return store_units<uint32_t>(to, pack);
  if (alignment == 2) return store_units<uint16_t>(to, pack);
  store_units<uint8_t>(to, pack);
}

// The first `bytes` of a pack, where memory ends before the rest.
PK_HOST_DEVICE inline Pack load_part(const std::byte* from, size_t bytes) {
  std::byte units[16];
  PK_UNROLL
  for (size_t i = 0; i < 16; ++i) units[i] = i < bytes ? from[i] : std::byte{0};
  Pack pack;
  memcpy(&pack, units, 16);
  return pack;
}
PK_HOST_DEVICE inline void store_part(std::byte* to, const Pack& pack, size_t bytes) {
  std::byte units[16];
  memcpy(units, &pack, 16);
  PK_UNROLL
  for (size_t i = 0; i < 16; ++i) {
    if (i < bytes) to[i] = units[i];
  }
}
PK_HOST_DEVICE inline Pack load_any(const std::byte* from, size_t bytes) {
  return bytes == 16 ? load_pack(from, alignment_of(from)) : load_part(from, bytes);
}
PK_HOST_DEVICE inline void store_any(std::byte* to, const Pack& pack, size_t bytes) {
  bytes == 16 ? store_pack(to, pack, alignment_of(to)) : store_part(to, pack, bytes);
}

// By all threads of a block. Both may be the same, but not overlap otherwise.
template <class Team>
PK_HOST_DEVICE void copy_block(const Team& team, std::byte* to, const std::byte* from,
                               size_t bytes) {
  if (to == from) return;
  constexpr int kInFlight = 4;  // Loads that a thread issues before its first store.
  const int from_alignment = alignment_of(from), to_alignment = alignment_of(to);
  const size_t packs = bytes / 16, stride = team.threads();
  for (size_t first = team.thread(); first < packs; first += kInFlight * stride) {
    Pack held[kInFlight];
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      const size_t i = first + k * stride;
      if (i < packs) held[k] = load_pack(from + i * 16, from_alignment);
    }
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      const size_t i = first + k * stride;
      if (i < packs) store_pack(to + i * 16, held[k], to_alignment);
    }
  }
  for (size_t i = packs * 16 + team.thread(); i < bytes; i += stride) to[i] = from[i];
}

// Sets all bits: a NaN, or -1, and nobody's sum.
template <class Team>
PK_HOST_DEVICE void spoil_block(const Team& team, std::byte* to, size_t bytes) {
  const int alignment = alignment_of(to);
  const size_t packs = bytes / 16;
  const Pack ones{{~0u, ~0u, ~0u, ~0u}};
  for (size_t i = team.thread(); i < packs; i += team.threads()) {
    store_pack(to + i * 16, ones, alignment);
  }
  for (size_t i = packs * 16 + team.thread(); i < bytes; i += team.threads()) {
    to[i] = std::byte{0xff};
  }
}

// ---- element types -----------------------------------------------------------------------------

template <class To, class From>
PK_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Elements that are their own accumulators; integers are summed without signs, as sums wrap around.
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

// The conversions of NaNs are not the hardware's, which lose their bits.
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
    // Adding 0.5 leaves units of 2^-24 in the mantissa, rounded by the addition itself.
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

// ---- reductions --------------------------------------------------------------------------------

// The elements of a pack, widened.
template <class Type>
struct Wide {
  using Element = typename Type::Element;
  using Accumulator = typename Type::Accumulator;
  static constexpr int kElements = 16 / sizeof(Element);
  static constexpr int kPartialBytes = kElements * sizeof(Accumulator);

  Accumulator values[kElements];

  PK_HOST_DEVICE explicit Wide(const Pack& pack) {
    Element elements[kElements];
    memcpy(elements, &pack, 16);
    PK_UNROLL
    for (int i = 0; i < kElements; ++i) values[i] = Type::widen(elements[i]);
  }

  PK_HOST_DEVICE void combine(const Wide& other, Reduction reduction) {
    if (reduction == Reduction::kMax) {
      PK_UNROLL
      for (int i = 0; i < kElements; ++i) {
        const Accumulator a = values[i], b = other.values[i];
        values[i] = Type::less(b, a) || a != a ? a : b;
      }
    } else if (reduction == Reduction::kMin) {
      PK_UNROLL
      for (int i = 0; i < kElements; ++i) {
        const Accumulator a = values[i], b = other.values[i];
        values[i] = Type::less(a, b) || a != a ? a : b;
      }
    } else {
      PK_UNROLL
      for (int i = 0; i < kElements; ++i) values[i] += other.values[i];
    }
  }

  // Of `terms` terms, rounded to the element type.
  PK_HOST_DEVICE Pack finish(Reduction reduction, int terms) const {
    Element elements[kElements];
    PK_UNROLL
    for (int i = 0; i < kElements; ++i) {
      Accumulator v = values[i];
      if constexpr (std::is_floating_point_v<Accumulator>) {
        if (reduction == Reduction::kAvg) v /= static_cast<Accumulator>(terms);
        if (reduction <= Reduction::kAvg && v != v) memset(&v, 0xff, sizeof(v));
      }
      elements[i] = Type::narrow(v);
    }
    Pack pack;
    memcpy(&pack, elements, 16);
    return pack;
  }

  // Partial results are kept unrounded, in aligned memory.
  PK_HOST_DEVICE static Wide load_partial(const std::byte* from) {
    Wide wide;
    PK_UNROLL
    for (int i = 0; i < kPartialBytes / 16; ++i) {
      const Pack pack = load_pack(from + i * 16, 16);
      memcpy(wide.values + i * (16 / sizeof(Accumulator)), &pack, 16);
    }
    return wide;
  }
  PK_HOST_DEVICE void store_partial(std::byte* to) const {
    PK_UNROLL
    for (int i = 0; i < kPartialBytes / 16; ++i) {
      Pack pack;
      memcpy(&pack, values + i * (16 / sizeof(Accumulator)), 16);
      store_pack(to + i * 16, pack, 16);
    }
  }

 private:
  Wide() = default;
};

// Calls step(i, bytes) for packs i of `bytes` in all that are this thread's; `bytes` is 16 but for
// the last.
template <class Team, class Step>
PK_HOST_DEVICE void for_each_pack(const Team& team, size_t bytes, Step step) {
  const size_t packs = bytes / 16;
  for (size_t i = team.thread(); i < packs; i += team.threads()) step(i, size_t{16});
  if (bytes % 16 != 0 && packs % team.threads() == static_cast<size_t>(team.thread())) {
    step(packs, bytes % 16);
  }
}

// Reduces `bytes` of sources[0], ..., sources[terms - 1] by all threads of a block, in this order,
// and hands each pack to store(i, pack, bytes). A source may be where store() writes.
template <class Type, class Team, class Store>
PK_HOST_DEVICE void reduce_block(const Team& team, const std::byte* const* sources, int terms,
                                 size_t bytes, Reduction reduction, Store store) {
  constexpr int kInFlight = 4;  // Loads that a thread issues before it waits for the first.
  int alignment = 16;
  for (int s = 0; s < terms; ++s) {
    const int own = alignment_of(sources[s]);
    if (own < alignment) alignment = own;
  }
  for_each_pack(team, bytes, [&](size_t i, size_t size) {
    const auto load = [&](int s) {
      const std::byte* from = sources[s] + i * 16;
      return size == 16 ? load_pack(from, alignment) : load_part(from, size);
    };
    Wide<Type> total(load(0));
    for (int s = 1; s < terms; s += kInFlight) {
      Pack held[kInFlight];
      PK_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (s + k < terms) held[k] = load(s + k);
      }
      PK_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (s + k < terms) total.combine(Wide<Type>(held[k]), reduction);
      }
    }
    store(i, total.finish(reduction, terms), size);
  });
}

}  // namespace pipekernels
