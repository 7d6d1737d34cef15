// The reduction kernels, written once over vectors of kVectorBytes and compiled once per
// instruction set by reduce_{baseline,avx2,avx512}.cpp.
//
// Everything here has internal linkage and uses no inline function of other headers. Otherwise the
// linker could merge copies that were compiled for different instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pipekernels/elements/reduce.h"
#include "vectors.h"

namespace pipekernels {
namespace {

// ---- element types ---------------------------------------------------------------------------
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

// ---- reductions --------------------------------------------------------------------------------

struct Sum {
  template <class V>
  static V combine(V a, V b) {
    return a + b;
  }
  template <class V>
  static V finish(V v, int) {
    return v;
  }
  template <class Type, class Parts>
  static auto narrow(const Parts* parts) {
    return Type::narrow_sum(parts);
  }
};

struct Avg : Sum {
  template <class V>
  static V finish(V v, int terms) {
    return v / (V{} + static_cast<decltype(v[0] + v[0])>(terms));
  }
};

struct Extremum {
  template <class V>
  static V finish(V v, int) {
    return v;
  }
  template <class Type, class Parts>
  static auto narrow(const Parts* parts) {
    return Type::narrow(parts);
  }
};

struct Max : Extremum {
  template <class V>
  static V combine(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct Min : Extremum {
  template <class V>
  static V combine(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

// ---- kernels -----------------------------------------------------------------------------------

// One vector of elements, widened.
template <class Type>
struct Wide {
  using Element = typename Type::Element;
  using Accumulator = typename Type::Accumulator;
  static constexpr size_t kElements = kVectorBytes / sizeof(Element);

  Vector<Accumulator> parts[Type::kParts];

  // Loads `count` <= kElements elements from index i.
  static Wide load(const void* source, size_t i, size_t count) {
    Vector<Element> v{};
    std::memcpy(&v, static_cast<const Element*>(source) + i, count * sizeof(Element));
    Wide wide;
    Type::widen(v, wide.parts);
    return wide;
  }
  template <class Op>
  void combine(const Wide& other) {
    for (int p = 0; p < Type::kParts; ++p) parts[p] = Op::combine(parts[p], other.parts[p]);
  }
  template <class Op>
  Vector<Element> finish(int terms) {
    for (auto& part : parts) part = Op::finish(part, terms);
    return Op::template narrow<Type>(parts);
  }
  static void store(Vector<Element> v, void* destination, size_t i, size_t count) {
    std::memcpy(static_cast<Element*>(destination) + i, &v, count * sizeof(Element));
  }

  // Partial results are stored in the order of the parts, always as whole vectors.
  static Wide load_partial(const void* source, size_t i) {
    Wide wide;
    std::memcpy(wide.parts, static_cast<const Accumulator*>(source) + i, sizeof(parts));
    return wide;
  }
  void store_partial(void* destination, size_t i) const {
    std::memcpy(static_cast<Accumulator*>(destination) + i, parts, sizeof(parts));
  }
};

// Lists of tensors: all tensors, all but this rank's, and lists of a length known at compile time,
// whose pointers stay in registers.
struct AllPointers {
  const void* const* each;
  int count;

  const void* operator[](int i) const { return each[i]; }
};
struct PeerPointers {
  void* const* each;
  int own;
  int count;

  void* operator[](int i) const { return each[i < own ? i : i + 1]; }
};
struct TwoPointers {
  const void *first, *second;
  static constexpr int count = 2;

  const void* operator[](int i) const { return i == 0 ? first : second; }
};
struct OnePointer {
  void* only;
  static constexpr int count = 1;

  void* operator[](int) const { return only; }
};
struct NoPointers {
  static constexpr int count = 0;

  void* operator[](int) const { return nullptr; }
};

template <class Type, class Op>
struct Kernels {
  using W = Wide<Type>;
  using Element = typename W::Element;
  static constexpr size_t kElements = W::kElements;

  // Calls step(i, n) for consecutive runs of n elements from i; n is kElements except for the last.
  template <class Step>
  static void for_each_vector(size_t begin, size_t count, Step step) {
    size_t i = begin;
    for (; i + kElements <= count; i += kElements) step(i, kElements);
    if (i < count) step(i, count - i);
  }

  // Stores the result to `destination` and to `peers`, which are sources in other cores' caches.
  template <class Sources, class Peers>
  static void reduce_to(void* destination, Peers peers, Sources sources, size_t count) {
    constexpr size_t kUnroll = 2;
    // How far ahead the peers' lines are prefetched. A shorter distance keeps too few requests in
    // flight. If the cores do not share a cache, 512 bytes take a fifth longer than no prefetch, as
    // do prefetches beyond the end, to which their owner may be writing.
    constexpr size_t kAhead = 384 / sizeof(Element);
    const int terms = sources.count;
    size_t i = 0;
    for (; i + kUnroll * kElements <= count; i += kUnroll * kElements) {
      const size_t ahead = i + kAhead < count ? i + kAhead : i;
      for (int p = 0; p < peers.count; ++p) {
        for (size_t u = 0; u < kUnroll; ++u) {
          __builtin_prefetch(static_cast<Element*>(peers[p]) + ahead + u * kElements);
        }
      }
      W wide[kUnroll];
      for (size_t u = 0; u < kUnroll; ++u) {
        wide[u] = W::load(sources[0], i + u * kElements, kElements);
      }
      for (int s = 1; s < terms; ++s) {
        for (size_t u = 0; u < kUnroll; ++u) {
          wide[u].template combine<Op>(W::load(sources[s], i + u * kElements, kElements));
        }
      }
      Vector<Element> results[kUnroll];
      for (size_t u = 0; u < kUnroll; ++u) results[u] = wide[u].template finish<Op>(terms);
      const auto store = [&](void* place) {
        for (size_t u = 0; u < kUnroll; ++u) {
          W::store(results[u], place, i + u * kElements, kElements);
        }
      };
      for (int p = 0; p < peers.count; ++p) store(peers[p]);
      store(destination);
    }
    for_each_vector(i, count, [=](size_t at, size_t n) {
      W wide = W::load(sources[0], at, n);
      for (int s = 1; s < terms; ++s) wide.template combine<Op>(W::load(sources[s], at, n));
      const Vector<Element> result = wide.template finish<Op>(terms);
      for (int p = 0; p < peers.count; ++p) W::store(result, peers[p], at, n);
      W::store(result, destination, at, n);
    });
  }

  static void reduce(void* destination, const void* const* sources, int terms, size_t count) {
    reduce_to(destination, NoPointers{}, AllPointers{sources, terms}, count);
  }

  static void reduce_in_place(void* const* tensors, int terms, int own, size_t count) {
    if (terms == 2) {  // A fifth faster than the general case.
      return reduce_to(tensors[own], OnePointer{tensors[1 - own]},
                       TwoPointers{tensors[0], tensors[1]}, count);
    }
    reduce_to(tensors[own], PeerPointers{tensors, own, terms - 1}, AllPointers{tensors, terms},
              count);
  }

  static void accumulate(void* destination, const void* partial, const void* source, size_t count) {
    for_each_vector(0, count, [=](size_t at, size_t n) {
      W wide = W::load(source, at, n);
      if (partial) {
        const W term = wide;
        wide = W::load_partial(partial, at);
        wide.template combine<Op>(term);
      }
      wide.store_partial(destination, at);
    });
  }

  static void finish(void* destination, const void* partial, const void* source, int terms,
                     size_t count) {
    for_each_vector(0, count, [=](size_t at, size_t n) {
      W wide = W::load_partial(partial, at);
      wide.template combine<Op>(W::load(source, at, n));
      W::store(wide.template finish<Op>(terms), destination, at, n);
    });
  }

  static constexpr ReduceKernels kTable = {&reduce, &reduce_in_place, &accumulate, &finish};
};

template <class Type>
constexpr ReduceKernels kFloatTable[kReductions] = {
    Kernels<Type, Sum>::kTable, Kernels<Type, Avg>::kTable, Kernels<Type, Max>::kTable,
    Kernels<Type, Min>::kTable};

// Sums of integers wrap around, which is defined only for unsigned types.
template <class Signed, class Unsigned>
constexpr ReduceKernels kIntegerTable[kReductions] = {Kernels<Plain<Unsigned>, Sum>::kTable,
                                                      {},
                                                      Kernels<Plain<Signed>, Max>::kTable,
                                                      Kernels<Plain<Signed>, Min>::kTable};

constexpr const ReduceKernels* kTables[kReducibleDTypes] = {
    kFloatTable<Plain<double>>, kFloatTable<Plain<float>>,        kFloatTable<Fp16>,
    kFloatTable<Bf16>,          kIntegerTable<int32_t, uint32_t>, kIntegerTable<int64_t, uint64_t>,
};

}  // namespace
}  // namespace pipekernels
