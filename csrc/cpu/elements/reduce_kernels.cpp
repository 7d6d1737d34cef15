// The reduction kernels, written once over vectors of kVectorBytes and compiled once per
// instruction set; with AVX512-BF16 those of bfloat16 alone.
//
// Everything else has internal linkage and uses no inline function of other headers. Otherwise the
// linker could merge copies that were compiled for different instruction sets.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "element_types.h"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {
namespace {

// ---- reductions --------------------------------------------------------------------------------

struct Sum {
  static constexpr bool kTree = false;
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

// In tree order; see tree_order.h.
struct TreeSum : Sum {
  using InRankOrder = Sum;
  static constexpr bool kTree = true;
};

struct TreeAvg : Avg {
  using InRankOrder = Avg;
  static constexpr bool kTree = true;
};

struct Product : Sum {
  template <class V>
  static V combine(V a, V b) {
    return a * b;
  }
};

struct And : Sum {
  template <class V>
  static V combine(V a, V b) {
    return a & b;
  }
};

struct Or : Sum {
  template <class V>
  static V combine(V a, V b) {
    return a | b;
  }
};

struct Xor : Sum {
  template <class V>
  static V combine(V a, V b) {
    return a ^ b;
  }
};

struct Extremum {
  static constexpr bool kTree = false;
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

  // The vectors of kUnroll * kElements elements from a common index on, or, if kUnroll is 1, of up
  // to kElements.
  template <size_t kUnroll>
  struct Vectors {
    W wide[kUnroll];

    // Combines terms [first, first + terms) in rank order.
    template <class Sources>
    static Vectors run(Sources sources, int first, int terms, size_t at, size_t n) {
      Vectors total;
      for (size_t u = 0; u < kUnroll; ++u) {
        total.wide[u] = W::load(sources[first], at + u * kElements, n);
      }
      for (int s = first + 1; s < first + terms; ++s) {
        for (size_t u = 0; u < kUnroll; ++u) {
          total.wide[u].template combine<Op>(W::load(sources[s], at + u * kElements, n));
        }
      }
      return total;
    }
    void combine(const Vectors& other) {
      for (size_t u = 0; u < kUnroll; ++u) wide[u].template combine<Op>(other.wide[u]);
    }

    // Combines all terms in tree order. The stack holds sums of whole groups of four.
    template <class Sources>
    static Vectors tree(Sources sources, size_t at, size_t n) {
      constexpr int kLevels = 29;  // For any number of terms.
      Vectors stack[kLevels];
      int depth = 0;
      const auto merge_top = [&](Vectors& right) {
        Vectors left = stack[--depth];
        left.combine(right);
        right = left;
      };
      const int terms = sources.count;
      for (int first = 0;; first += 4) {
        const int left = terms - first;
        Vectors total = run(sources, first, left < 2 ? left : 2, at, n);
        if (left > 2) total.combine(run(sources, first + 2, left < 4 ? left - 2 : 2, at, n));
        if (left <= 4) {
          while (depth > 0) merge_top(total);
          return total;
        }
        for (int group = first / 4; group & 1; group >>= 1) merge_top(total);
        stack[depth++] = total;
      }
    }

    template <class Sources>
    static Vectors reduce(Sources sources, size_t at, size_t n) {
      if constexpr (Op::kTree) {
        return tree(sources, at, n);
      } else {
        return run(sources, 0, sources.count, at, n);
      }
    }
  };

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
      auto total = Vectors<kUnroll>::reduce(sources, i, kElements);
      Vector<Element> results[kUnroll];
      for (size_t u = 0; u < kUnroll; ++u) results[u] = total.wide[u].template finish<Op>(terms);
      const auto store = [&](void* place) {
        for (size_t u = 0; u < kUnroll; ++u) {
          W::store(results[u], place, i + u * kElements, kElements);
        }
      };
      for (int p = 0; p < peers.count; ++p) store(peers[p]);
      store(destination);
    }
    for_each_vector(i, count, [=](size_t at, size_t n) {
      W wide = Vectors<1>::reduce(sources, at, n).wide[0];
      const Vector<Element> result = wide.template finish<Op>(terms);
      for (int p = 0; p < peers.count; ++p) W::store(result, peers[p], at, n);
      W::store(result, destination, at, n);
    });
  }

  static constexpr int kSameTerms = 3;  // Up to so many, tree order is rank order.

  static void reduce(void* destination, const void* const* sources, int terms, size_t count) {
    if constexpr (Op::kTree) {
      if (terms <= kSameTerms) {
        return Kernels<Type, typename Op::InRankOrder>::reduce(destination, sources, terms, count);
      }
    }
    reduce_to(destination, NoPointers{}, AllPointers{sources, terms}, count);
  }

  static void reduce_in_place(void* const* tensors, int terms, int own, size_t count) {
    if constexpr (Op::kTree) {
      if (terms <= kSameTerms) {
        return Kernels<Type, typename Op::InRankOrder>::reduce_in_place(tensors, terms, own, count);
      }
    } else if (terms == 2) {  // A fifth faster than the general case.
      return reduce_to(tensors[own], OnePointer{tensors[1 - own]},
                       TwoPointers{tensors[0], tensors[1]}, count);
    }
    reduce_to(tensors[own], PeerPointers{tensors, own, terms - 1}, AllPointers{tensors, terms},
              count);
  }

  // How many partial results there are after `terms` terms.
  static int partials_after(int terms) {
    if (!Op::kTree) return terms > 0;
    int partials = 0;
    for (; terms > 0; terms >>= 1) partials += terms & 1;
    return partials;
  }

  // Combines the partial result at `at` with `wide`.
  static void add_to(const void* partials, size_t at, W& wide) {
    const W right = wide;
    wide = W::load_partial(partials, at);
    wide.template combine<Op>(right);
  }

  static void accumulate(void* destination, const void* partials, const void* source, int index,
                         size_t stride, size_t count) {
    const int arrived = partials_after(index), kept = partials_after(index + 1) - 1;
    for_each_vector(0, count, [=](size_t at, size_t n) {
      W wide = W::load(source, at, n);
      if constexpr (Op::kTree) {
        for (int p = arrived; p > kept; --p) add_to(partials, (p - 1) * stride + at, wide);
        for (int p = 0; p < kept; ++p) {
          W::load_partial(partials, p * stride + at).store_partial(destination, p * stride + at);
        }
        wide.store_partial(destination, kept * stride + at);
      } else {
        if (arrived > 0) add_to(partials, at, wide);
        wide.store_partial(destination, at);
      }
    });
  }

  static void finish(void* destination, const void* partials, const void* source, int terms,
                     size_t stride, size_t count) {
    const int arrived = Op::kTree ? partials_after(terms - 1) : 1;
    for_each_vector(0, count, [=](size_t at, size_t n) {
      W wide = W::load(source, at, n);
      for (int p = arrived; p > 0; --p) add_to(partials, (p - 1) * stride + at, wide);
      W::store(wide.template finish<Op>(terms), destination, at, n);
    });
  }

  static constexpr ReduceKernels kTable = {&reduce, &reduce_in_place, &accumulate, &finish};
};

// The kernels `Each` for elements of two numbers.
template <class Each>
struct Pairs {
  static void reduce(void* destination, const void* const* sources, int terms, size_t count) {
    Each::reduce(destination, sources, terms, 2 * count);
  }
  static void reduce_in_place(void* const* tensors, int terms, int own, size_t count) {
    Each::reduce_in_place(tensors, terms, own, 2 * count);
  }
  static void accumulate(void* destination, const void* partials, const void* source, int index,
                         size_t stride, size_t count) {
    Each::accumulate(destination, partials, source, index, 2 * stride, 2 * count);
  }
  static void finish(void* destination, const void* partials, const void* source, int terms,
                     size_t stride, size_t count) {
    Each::finish(destination, partials, source, terms, 2 * stride, 2 * count);
  }

  static constexpr ReduceKernels kTable = {&reduce, &reduce_in_place, &accumulate, &finish};
};

// The tables have the order of Reduction.
template <class Type>
constexpr ReduceKernels kFloatTable[kReductions] = {
    Kernels<Type, Sum>::kTable,
    Kernels<Type, Avg>::kTable,
    Kernels<Type, Max>::kTable,
    Kernels<Type, Min>::kTable,
    Kernels<Type, TreeSum>::kTable,
    Kernels<Type, TreeAvg>::kTable,
    Kernels<Type, Product>::kTable,
    {},
    {},
    {},
    Kernels<Type, Sum>::kTable,
};

template <class Type>
constexpr ReduceKernels kComplexTable[kReductions] = {
    Pairs<Kernels<Type, Sum>>::kTable,
    Pairs<Kernels<Type, Avg>>::kTable,
    {},
    {},
    Pairs<Kernels<Type, TreeSum>>::kTable,
    Pairs<Kernels<Type, TreeAvg>>::kTable,
    {},
    {},
    {},
    {},
    Pairs<Kernels<Type, Sum>>::kTable,
};

// Sums of integers wrap around, which is defined only for unsigned types.
template <class Element, class Unsigned>
constexpr ReduceKernels kIntegerTable[kReductions] = {
    Kernels<Plain<Unsigned>, Sum>::kTable,     {},
    Kernels<Plain<Element>, Max>::kTable,      Kernels<Plain<Element>, Min>::kTable,
    Kernels<Plain<Unsigned>, Sum>::kTable,     {},
    Kernels<Plain<Unsigned>, Product>::kTable, Kernels<Plain<Unsigned>, And>::kTable,
    Kernels<Plain<Unsigned>, Or>::kTable,      Kernels<Plain<Unsigned>, Xor>::kTable,
    Kernels<Plain<Unsigned>, Sum>::kTable,
};

constexpr ReduceKernels kBoolTable[kReductions] = {
    Kernels<Plain<uint8_t>, Or>::kTable,
    {},
    Kernels<Plain<uint8_t>, Or>::kTable,
    Kernels<Plain<uint8_t>, And>::kTable,
    Kernels<Plain<uint8_t>, Or>::kTable,
    {},
    Kernels<Plain<uint8_t>, And>::kTable,
    Kernels<Plain<uint8_t>, And>::kTable,
    Kernels<Plain<uint8_t>, Or>::kTable,
    Kernels<Plain<uint8_t>, Xor>::kTable,
    {},
};

// In the order of DType; null for those of 8 and 4 bits.
constexpr const ReduceKernels* kTables[kDTypes] = {
    kFloatTable<Plain<double>>,
    kFloatTable<Plain<float>>,
    kFloatTable<Fp16>,
    kFloatTable<Bf16>,
    kIntegerTable<int32_t, uint32_t>,
    kIntegerTable<int64_t, uint64_t>,
    kIntegerTable<int16_t, uint16_t>,
    kIntegerTable<int8_t, uint8_t>,
    kIntegerTable<uint8_t, uint8_t>,
    kBoolTable,
    kComplexTable<Plain<float>>,
    kComplexTable<Plain<double>>,
    kComplexTable<Fp16>,
    kIntegerTable<uint16_t, uint16_t>,
    kIntegerTable<uint32_t, uint32_t>,
    kIntegerTable<uint64_t, uint64_t>,
};

}  // namespace

#if defined(__AVX512BF16__)
const ReduceKernels* reduce_table_avx512bf16() { return kFloatTable<Bf16>; }
#else
const ReduceKernels* const* PIPEKERNELS_FOR_ISA(reduce_tables)() { return kTables; }
#endif

}  // namespace pipekernels
