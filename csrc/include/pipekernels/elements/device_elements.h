// Copies and reductions by the threads of a thread block, 16 bytes at a time. Reductions produce
// the same bits as those of reduce.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/elements/elements.h"
#include "pipekernels/host/host_device.h"

namespace pipekernels {

struct alignas(16) Pack {
  uint32_t words[4];
};

// Whether both pointers are multiples of `size`, a power of two.
PK_HOST_DEVICE inline bool is_aligned(const void* a, const void* b, size_t size) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & (size - 1)) == 0;
}

// Loads a unit that is aligned to its size, with one memory access on a device.
template <class Unit>
PK_HOST_DEVICE Unit load_unit(const std::byte* from) {
  Unit unit;
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Unit) == 16) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    memcpy(&unit, &words, 16);
  } else {
    unit = *reinterpret_cast<const Unit*>(from);
  }
#else
  std::memcpy(&unit, from, sizeof(Unit));
#endif
  return unit;
}

template <class Unit>
PK_HOST_DEVICE void store_unit(std::byte* to, const Unit& unit) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Unit) == 16) {
    uint4 words;
    memcpy(&words, &unit, 16);
    *reinterpret_cast<uint4*>(to) = words;
  } else {
    *reinterpret_cast<Unit*>(to) = unit;
  }
#else
  std::memcpy(to, &unit, sizeof(Unit));
#endif
}

template <class Unit, class Team>
PK_HOST_DEVICE void copy_units(const Team& team, std::byte* to, const std::byte* from,
                               size_t units) {
  constexpr int kInFlight = 4;  // Loads that a thread issues before its first store.
  const size_t stride = team.threads();
  size_t i = team.thread();
  for (; i + (kInFlight - 1) * stride < units; i += kInFlight * stride) {
    Unit held[kInFlight];
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      held[k] = load_unit<Unit>(from + (i + k * stride) * sizeof(Unit));
    }
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) store_unit(to + (i + k * stride) * sizeof(Unit), held[k]);
  }
  for (; i < units; i += stride) {
    store_unit(to + i * sizeof(Unit), load_unit<Unit>(from + i * sizeof(Unit)));
  }
}

// Called by all threads of a block. `to` may equal `from`; the ranges must not overlap otherwise.
template <class Team>
PK_HOST_DEVICE void copy_block(const Team& team, std::byte* to, const std::byte* from,
                               size_t bytes) {
  if (to == from) return;
  size_t done = 0;
  if (is_aligned(to, from, 16)) {
    done = bytes / 16 * 16;
    copy_units<Pack>(team, to, from, bytes / 16);
  } else if (is_aligned(to, from, 4)) {
    done = bytes / 4 * 4;
    copy_units<uint32_t>(team, to, from, bytes / 4);
  }
  copy_units<uint8_t>(team, to + done, from + done, bytes - done);
}

// Sets all bits, which makes floating-point elements NaN and integers -1, so that a failed
// collective does not leave plausible results.
template <class Team>
PK_HOST_DEVICE void poison_block(const Team& team, std::byte* to, size_t bytes) {
  const size_t packs = is_aligned(to, to, 16) ? bytes / 16 : 0;
  const Pack ones{{~0u, ~0u, ~0u, ~0u}};
  for (size_t i = team.thread(); i < packs; i += team.threads()) store_unit(to + i * 16, ones);
  for (size_t i = packs * 16 + team.thread(); i < bytes; i += team.threads()) {
    to[i] = std::byte{0xff};
  }
}

// ---- reductions --------------------------------------------------------------------------------

// The elements of a unit (a Pack or one element), widened to accumulators.
template <class Type, class Unit>
struct Wide {
  using Element = typename Type::Element;
  using Accumulator = typename Type::Accumulator;
  static constexpr int kElements = sizeof(Unit) / sizeof(Element);

  Accumulator values[kElements];

  PK_HOST_DEVICE explicit Wide(const Unit& unit) {
    Element elements[kElements];
    memcpy(elements, &unit, sizeof(unit));
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

  // Completes a reduction of `terms` terms and rounds it to the element type.
  PK_HOST_DEVICE Unit finish(Reduction reduction, int terms) const {
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
    Unit unit;
    memcpy(&unit, elements, sizeof(unit));
    return unit;
  }

  // Partial results are stored unrounded in aligned memory, element i at i * kPartialSize.
  static constexpr size_t kPartialSize = sizeof(Accumulator);
  using PartialUnit = std::conditional_t<sizeof(values) % 16 == 0, Pack, Accumulator>;
  static constexpr int kPartialUnits = sizeof(values) / (sizeof(PartialUnit));

  PK_HOST_DEVICE static Wide load_partial(const std::byte* from) {
    PartialUnit units[kPartialUnits];
    PK_UNROLL
    for (int i = 0; i < kPartialUnits; ++i) {
      units[i] = load_unit<PartialUnit>(from + i * sizeof(PartialUnit));
    }
    Wide wide;
    memcpy(wide.values, units, sizeof(wide.values));
    return wide;
  }
  PK_HOST_DEVICE void store_partial(std::byte* to) const {
    PartialUnit units[kPartialUnits];
    memcpy(units, values, sizeof(values));
    PK_UNROLL
    for (int i = 0; i < kPartialUnits; ++i) store_unit(to + i * sizeof(PartialUnit), units[i]);
  }

 private:
  Wide() = default;
};

// Calls step(offset, unit) for this thread's units of `bytes`. If `aligned`, these are whole packs
// and then the remaining elements, else all are elements. `unit` is a dummy value that carries the
// unit's type.
template <class Element, class Team, class Step>
PK_HOST_DEVICE void for_each_unit(const Team& team, size_t bytes, bool aligned, Step step) {
  const size_t packs = aligned ? bytes / 16 : 0;
  for (size_t i = team.thread(); i < packs; i += team.threads()) step(i * 16, Pack{});
  for (size_t i = packs * 16 / sizeof(Element) + team.thread(); i < bytes / sizeof(Element);
       i += team.threads()) {
    step(i * sizeof(Element), Element{});
  }
}

// Calls step(a, b, unit) with the byte offsets of two of this thread's units in [begin, end), so
// that the loads of both are in flight together. For a last unit without a partner, b equals a.
template <class Unit, class Team, class Step>
PK_HOST_DEVICE void for_each_pair(const Team& team, size_t begin, size_t end, Step step) {
  const size_t stride = team.threads();
  for (size_t i = begin + team.thread(); i < end; i += 2 * stride) {
    const size_t other = i + stride < end ? i + stride : i;
    step(i * sizeof(Unit), other * sizeof(Unit), Unit{});
  }
}

// Reduces `bytes` of sources[0], ..., sources[terms - 1], in this order, with all threads of a
// block, and passes each unit to store(offset, unit), which may overwrite the sources. `target` is
// where store() writes if that is none of the sources, else null; its alignment limits the units.
template <class Type, class Team, class Store>
PK_HOST_DEVICE void reduce_block(const Team& team, const std::byte* const* sources, int terms,
                                 size_t bytes, Reduction reduction, const std::byte* target,
                                 Store store) {
  using Element = typename Type::Element;
  bool aligned = is_aligned(target, target, 16);
  for (int s = 0; s < terms; ++s) aligned = aligned && is_aligned(sources[s], sources[s], 16);
  const auto reduce_pair = [&](size_t a, size_t b, auto unit) {
    using Unit = decltype(unit);
    constexpr int kInFlight = 2;  // Terms whose units a thread loads before it uses the first.
    const Unit first = load_unit<Unit>(sources[0] + a), second = load_unit<Unit>(sources[0] + b);
    Wide<Type, Unit> total_a(first), total_b(second);
    for (int s = 1; s < terms; s += kInFlight) {
      Unit held_a[kInFlight], held_b[kInFlight];
      PK_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        held_a[k] = s + k < terms ? load_unit<Unit>(sources[s + k] + a) : Unit{};
        held_b[k] = s + k < terms ? load_unit<Unit>(sources[s + k] + b) : Unit{};
      }
      PK_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (s + k >= terms) continue;
        total_a.combine(Wide<Type, Unit>(held_a[k]), reduction);
        total_b.combine(Wide<Type, Unit>(held_b[k]), reduction);
      }
    }
    store(a, total_a.finish(reduction, terms));
    store(b, total_b.finish(reduction, terms));
  };
  const size_t packs = aligned ? bytes / 16 : 0;
  for_each_pair<Pack>(team, 0, packs, reduce_pair);
  for_each_pair<Element>(team, packs * 16 / sizeof(Element), bytes / sizeof(Element), reduce_pair);
}

}  // namespace pipekernels
