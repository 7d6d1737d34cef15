// The units that a thread of a CUDA block loads and stores with one memory access each.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pipekernels/elements/elements.h"
#include "pipekernels/host/host_device.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"

namespace pipekernels {

struct alignas(16) Unit16 {
  uint32_t words[4];
};

template <typename Unit>
PK_HOST_DEVICE inline Unit load_unit(const char* place) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const Unit*>(place);  // one access, as `place` is aligned to its size
#else
  Unit unit;
  std::memcpy(&unit, place, sizeof(unit));
  return unit;
#endif
}

template <typename Unit>
PK_HOST_DEVICE inline void store_unit(char* place, const Unit& unit) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<Unit*>(place) = unit;
#else
  std::memcpy(place, &unit, sizeof(unit));
#endif
}

// Four bytes of eight: the lowest four bits of `selector` choose the lowest byte, by its number in
// `low` (0 to 3) or `high` (4 to 7).
PK_HOST_DEVICE inline uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) {
    selected |= (both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return selected;
#endif
}

// ---- casts -------------------------------------------------------------------------------------

// Whether a source unit of a cast may have this many bytes; see TiledCopy.
template <class From, class To>
PK_HOST_DEVICE constexpr bool is_cast_unit(int bytes) {
  constexpr int kFrom = sizeof(typename From::Element), kTo = sizeof(typename To::Element);
  constexpr int kMost = 16 / (kFrom < kTo ? kTo : kFrom);  // elements
  return !std::is_same_v<From, To> && (bytes == kFrom || bytes == kMost * kFrom);
}

template <int kBytes>
using UnitOf = std::conditional_t<
    kBytes == 2, uint16_t,
    std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 8, uint64_t, Unit16>>>;

// Converts the elements of a source unit to the destination's type and stores them.
template <class From, class To, class Unit>
PK_HOST_DEVICE inline void store_cast(char* place, const Unit& unit) {
  constexpr int kElements = sizeof(Unit) / sizeof(typename From::Element);
  typename From::Element elements[kElements];
  typename To::Element converted[kElements];
  memcpy(elements, &unit, sizeof(unit));
  PK_UNROLL
  for (int i = 0; i < kElements; ++i) converted[i] = convert_element<From, To>(elements[i]);
  UnitOf<sizeof(converted)> result;
  memcpy(&result, converted, sizeof(result));
  store_unit(place, result);
}

// Stores a source unit, converted if the copy casts. All threads of a block take the same branches.
// The branches come after the loads, so that loads do not wait for one another.
template <bool kCasts, class Unit>
PK_HOST_DEVICE inline void store_maybe_cast(const TiledCopy& copy, char* place, const Unit& unit) {
  if (!kCasts || !copy.casts()) return store_unit(place, unit);
  if constexpr (kCasts) {
    with_floating_element(copy.from, [&](auto from) {
      using From = decltype(from);
      with_floating_element(copy.to, [&](auto to) {
        using To = decltype(to);
        if constexpr (is_cast_unit<From, To>(sizeof(Unit))) store_cast<From, To>(place, unit);
      });
    });
  }
}

}  // namespace pipekernels
