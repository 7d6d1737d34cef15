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
                               uint32_t units) {
  constexpr int kInFlight = 4;  // Loads that a thread issues before its first store.
  const uint32_t stride = team.threads();
  PK_ROLLED
  for (uint32_t i = team.thread(); i < units; i += kInFlight * stride) {
    const uint32_t left = units - i;
    const std::byte* source = from + size_t{sizeof(Unit)} * i;
    std::byte* target = to + size_t{sizeof(Unit)} * i;
    Unit held[kInFlight];
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (k * stride < left) held[k] = load_unit<Unit>(source + k * stride * sizeof(Unit));
    }
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (k * stride < left) store_unit(target + k * stride * sizeof(Unit), held[k]);
    }
  }
}

// Called by all threads of a block, for less than 4 GiB. `to` may equal `from`; the ranges must not
// overlap otherwise.
template <class Team>
PK_HOST_DEVICE void copy_block(const Team& team, std::byte* to, const std::byte* from,
                               size_t bytes) {
  if (to == from) return;
  size_t done = 0;
  const auto copy = [&](auto unit) {
    constexpr size_t kSize = sizeof(unit);
    copy_units<decltype(unit)>(team, to, from, bytes / kSize);
    done = bytes / kSize * kSize;
  };
  if (is_aligned(to, from, 16)) {
    copy(Pack{});
  } else if (is_aligned(to, from, 8)) {
    copy(uint64_t{});
  } else if (is_aligned(to, from, 4)) {
    copy(uint32_t{});
  } else if (is_aligned(to, from, 2)) {
    copy(uint16_t{});
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

  Wide() = default;
  PK_HOST_DEVICE explicit Wide(const Unit& unit) {
    Element elements[kElements];
    memcpy(elements, &unit, sizeof(unit));
    PK_UNROLL
    for (int i = 0; i < kElements; ++i) values[i] = Type::widen(elements[i]);
  }

  PK_HOST_DEVICE void combine(const Wide& other, Reduction reduction) {
    if (is_extremum(reduction)) {
      const bool greatest = reduction == Reduction::kMax;
      PK_UNROLL
      for (int i = 0; i < kElements; ++i) {
        const Accumulator a = values[i], b = other.values[i];
        values[i] = (greatest ? Type::less(b, a) : Type::less(a, b)) || a != a ? a : b;
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
        if (is_average(reduction)) v /= static_cast<Accumulator>(terms);
        if (!is_extremum(reduction) && v != v) memset(&v, 0xff, sizeof(v));
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
};

// Reduces units [begin, end) of sources[0], ..., sources[terms - 1], in this order. A thread issues
// the loads of kTerms terms of kUnits units before it uses the first: with packs, 16 loads fill 64
// of its registers.
template <class Type, class Unit, int kUnits, int kTerms, class Team, class Store>
PK_HOST_DEVICE void reduce_units(const Team& team, const std::byte* const* sources, int terms,
                                 uint32_t begin, uint32_t end, Reduction reduction, Store store) {
  using W = Wide<Type, Unit>;
  const uint32_t stride = team.threads();
  PK_ROLLED
  for (uint32_t i = begin + team.thread(); i < end; i += kUnits * stride) {
    const uint32_t left = end - i, offset = i * sizeof(Unit);
    W totals[kUnits];
    PK_ROLLED
    for (int first = 0; first < terms; first += kTerms) {
      Unit held[kTerms][kUnits];
      PK_UNROLL
      for (int t = 0; t < kTerms; ++t) {
        if (first + t >= terms) break;
        const std::byte* source = sources[first + t] + offset;
        PK_UNROLL
        for (int u = 0; u < kUnits; ++u) {
          if (u * stride < left) held[t][u] = load_unit<Unit>(source + u * stride * sizeof(Unit));
        }
      }
      PK_UNROLL
      for (int t = 0; t < kTerms; ++t) {
        if (first + t >= terms) break;
        PK_UNROLL
        for (int u = 0; u < kUnits; ++u) {
          if (u * stride >= left) break;
          const W term(held[t][u]);
          if (first + t == 0) {
            totals[u] = term;
          } else {
            totals[u].combine(term, reduction);
          }
        }
      }
    }
    PK_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      if (u * stride >= left) break;
      store(offset + u * stride * sizeof(Unit), totals[u].finish(reduction, terms));
    }
  }
}

// The same in tree order (tree_order.h), for up to 32 terms, a unit at a time. The stack is in
// registers: if bit l of the number of complete groups of four is 1, stack[l] is the sum of 2^l
// groups.
template <class Type, class Unit, class Team, class Store>
PK_HOST_DEVICE void reduce_units_as_tree(const Team& team, const std::byte* const* sources,
                                         int terms, uint32_t begin, uint32_t end,
                                         Reduction reduction, Store store) {
  using W = Wide<Type, Unit>;
  constexpr int kTerms = 4, kLevels = 3;
  const auto sum_of = [](W left, const W& right) {
    left.combine(right, Reduction::kSum);
    return left;
  };
  PK_ROLLED
  for (uint32_t i = begin + team.thread(); i < end; i += team.threads()) {
    const uint32_t offset = i * sizeof(Unit);
    W stack[kLevels], total;
    PK_ROLLED
    for (int group = 0; group * kTerms < terms; ++group) {
      const int first = group * kTerms;
      Unit held[kTerms];
      PK_UNROLL
      for (int t = 0; t < kTerms; ++t) {
        if (first + t < terms) held[t] = load_unit<Unit>(sources[first + t] + offset);
      }
      total = W(held[0]);
      if (first + 1 < terms) total = sum_of(total, W(held[1]));
      if (first + 2 < terms) {
        W right(held[2]);
        if (first + 3 < terms) right = sum_of(right, W(held[3]));
        total = sum_of(total, right);
      }
      const bool last = first + kTerms >= terms;
      PK_UNROLL
      for (int l = 0; l < kLevels; ++l) {
        const int lower = (1 << l) - 1;
        if (!last && (group & lower) != lower) break;  // The total has been pushed.
        if (group >> l & 1) {
          total = sum_of(stack[l], total);
        } else if (!last) {
          stack[l] = total;
        }
      }
    }
    store(offset, total.finish(reduction, terms));
  }
}

// Reduces `bytes`, less than 4 GiB, of sources[0], ..., sources[terms - 1], in this order, with all
// threads of a block, and passes each unit to store(offset, unit), which may overwrite the sources.
// `target` is where store() writes if that is none of the sources, else null; its alignment limits
// the units. `order` is order_of(reduction, terms); for `wide_loads` see DeviceLayout.
template <class Type, Order order, class Team, class Store>
PK_HOST_DEVICE void reduce_block(const Team& team, const std::byte* const* sources, int terms,
                                 size_t bytes, Reduction reduction, const std::byte* target,
                                 bool wide_loads, Store store) {
  using Element = typename Type::Element;
  bool aligned = is_aligned(target, target, 16);
  for (int s = 0; s < terms; ++s) aligned = aligned && is_aligned(sources[s], sources[s], 16);
  const size_t packs = aligned ? bytes / 16 : 0;
  const uint32_t first = packs * 16 / sizeof(Element), end = bytes / sizeof(Element);
  if constexpr (order == Order::kTree) {
    reduce_units_as_tree<Type, Pack>(team, sources, terms, 0, packs, reduction, store);
    reduce_units_as_tree<Type, Element>(team, sources, terms, first, end, reduction, store);
  } else {
    // Registers allow three; for float16, whose conversions branch, convergence barriers run out.
    constexpr bool kLong = sizeof(typename Type::Accumulator) == 8 || sizeof(Element) == 2;
    constexpr int kPacks = kLong ? 2 : 3;
    if (kLong && wide_loads && terms == 2) {
      reduce_units<Type, Pack, 4, 2>(team, sources, 2, 0, packs, reduction, store);
    } else {
      reduce_units<Type, Pack, kPacks, 4>(team, sources, terms, 0, packs, reduction, store);
    }
    reduce_units<Type, Element, 2, 4>(team, sources, terms, first, end, reduction, store);
  }
}

// Calls body(ElementOf<dtype>(), std::integral_constant<Order, order>()). Sums of integers are the
// same in all orders, and get Order::kRank.
template <class Body>
void with_element_and_order(DType dtype, Order order, Body body) {
  with_element(dtype, [&](auto element) {
    using Type = decltype(element);
    if constexpr (std::is_floating_point_v<typename Type::Accumulator>) {
      if (order == Order::kTree) {
        return body(element, std::integral_constant<Order, Order::kTree>());
      }
    }
    body(element, std::integral_constant<Order, Order::kRank>());
  });
}

}  // namespace pipekernels
