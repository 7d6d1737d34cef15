// The reduction kernels of every available instruction set, against scalar code.

#include "pipekernels/elements/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "check.h"
#include "pipekernels/elements/tree_order.h"

namespace {

using namespace pipekernels;

// ---- scalar definitions of the 16-bit formats -------------------------------------------------

float widen(uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  float value;
  if (exponent == (1 << exponent_bits) - 1) {
    value = mantissa ? std::numeric_limits<float>::quiet_NaN() : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)),
                       exponent - bias - mantissa_bits);
  }
  return bits & 0x8000 ? -value : value;
}

uint16_t narrow(float value, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(value)) return sign | infinity | 1 << (mantissa_bits - 1);
  if (std::isinf(value)) return sign | infinity;
  if (value == 0) return sign;
  // Count units in the last place: nearbyint() rounds to even, and a carry increments the exponent.
  int exponent = 0;
  std::frexp(value, &exponent);
  const int lowest = std::max(exponent - 1, 1 - bias);
  const double units = std::nearbyint(std::ldexp(std::fabs(double(value)), mantissa_bits - lowest));
  const double encoded = units + std::ldexp(double(lowest + bias - 1), mantissa_bits);
  return sign | static_cast<uint16_t>(std::min(encoded, double(infinity)));
}

// ---- scalar reductions ------------------------------------------------------------------------

template <class T>
struct Element {
  using Accumulator = T;
  static T widen(T v) { return v; }
  static T narrow(T v) { return v; }
};
struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};
template <>
struct Element<Fp16> {
  using Accumulator = float;
  static float widen(Fp16 v) { return ::widen(v.bits, 10); }
  static Fp16 narrow(float v) { return {::narrow(v, 10)}; }
};
template <>
struct Element<Bf16> {
  using Accumulator = float;
  static float widen(Bf16 v) { return ::widen(v.bits, 7); }
  static Bf16 narrow(float v) { return {::narrow(v, 7)}; }
};

template <class A>
A combine(A a, A b, Reduction reduction) {
  if (reduction == Reduction::kMax) return a > b || a != a ? a : b;
  if (reduction == Reduction::kMin) return a < b || a != a ? a : b;
  if constexpr (std::is_integral_v<A>) {
    const uint64_t x = a, y = b;  // Unsigned numbers wrap around.
    if (reduction == Reduction::kProduct) return static_cast<A>(x * y);
    if (reduction == Reduction::kAnd) return static_cast<A>(x & y);
    if (reduction == Reduction::kOr) return static_cast<A>(x | y);
    if (reduction == Reduction::kXor) return static_cast<A>(x ^ y);
    return static_cast<A>(x + y);
  } else {
    return reduction == Reduction::kProduct ? a * b : a + b;
  }
}

// Elements i of sources [first, first + terms), in rank order or as a tree: the left subtree has
// the largest power of two of terms that leaves one for the right.
template <class T>
auto reduce_range(const std::vector<const T*>& sources, size_t first, size_t terms, size_t i,
                  Reduction reduction) {
  if (terms == 1) return Element<T>::widen(sources[first][i]);
  size_t left = terms - 1;
  if (is_tree(reduction)) {
    left = 1;
    while (2 * left < terms) left *= 2;
  }
  return combine(reduce_range(sources, first, left, i, reduction),
                 reduce_range(sources, first + left, terms - left, i, reduction), reduction);
}

template <class T>
T reduce_scalar(const std::vector<const T*>& sources, size_t i, Reduction reduction) {
  auto sum = reduce_range(sources, 0, sources.size(), i, reduction);
  if (is_average(reduction)) sum = sum / static_cast<decltype(sum)>(sources.size());
  return Element<T>::narrow(sum);
}

template <class T>
bool is_nan(T v) {
  const auto x = Element<T>::widen(v);
  return x != x;
}

// Compares bits, but all NaNs are equal.
template <class T>
bool same_value(T a, T b) {
  return (is_nan(a) && is_nan(b)) || std::memcmp(&a, &b, sizeof(T)) == 0;
}

// ---- tests ------------------------------------------------------------------------------------

// Mostly a number of moderate size, sometimes any bits.
template <class T>
T random_element(std::mt19937_64& random) {
  uint64_t bits = random();
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  if (random() % 8 == 0 || std::is_integral_v<T>) return value;
  const double small = std::ldexp(double(int64_t(bits)), -62 + int(random() % 8));
  return Element<T>::narrow(static_cast<typename Element<T>::Accumulator>(small));
}

template <class T>
void test_reduce(DType dtype, Isa isa, std::mt19937_64& random) {
  for (int reduction_code = 0; reduction_code < kReductions; ++reduction_code) {
    const auto reduction = static_cast<Reduction>(reduction_code);
    if (!has_reduce_kernels(dtype, reduction)) continue;
    const bool is_sum = !is_extremum(reduction);
    const uint64_t all_bits = ~uint64_t{0};
    const ReduceKernels& kernels = reduce_kernels(dtype, reduction, isa);
    for (int trial = 0; trial < 30; ++trial) {
      const int terms = trial % 10 == 9 ? 32 : 1 + trial % 10;
      const size_t count = trial < 20 ? random() % 300 : random() % 5000;
      // Unaligned memory, with guard bytes behind.
      std::vector<std::vector<unsigned char>> memory(terms + 1);
      std::vector<const T*> sources;
      std::vector<std::vector<T>> values(terms, std::vector<T>(count));
      std::vector<const void*> pointers;
      for (int s = 0; s <= terms; ++s) memory[s].assign((count + 2) * sizeof(T) + 64, 0xa5);
      for (int s = 0; s < terms; ++s) {
        for (T& value : values[s]) value = random_element<T>(random);
        unsigned char* place = memory[s].data() + random() % 64;
        if (count > 0) std::memcpy(place, values[s].data(), count * sizeof(T));
        sources.push_back(values[s].data());
        pointers.push_back(place);
      }
      std::vector<T> expected(count);
      for (size_t i = 0; i < count; ++i) expected[i] = reduce_scalar(sources, i, reduction);
      const auto check = [&](const unsigned char* result) {
        for (size_t i = 0; i < count; ++i) {
          T value;
          std::memcpy(&value, result + i * sizeof(T), sizeof(T));
          CHECK(same_value(value, expected[i]));
          if (is_sum && is_nan(value)) CHECK(std::memcmp(&value, &all_bits, sizeof(T)) == 0);
        }
        CHECK(result[count * sizeof(T)] == 0xa5);
      };

      unsigned char* result = memory[terms].data() + random() % 64;
      kernels.reduce(result, pointers.data(), terms, count);
      check(result);

      if (terms > 1) {  // The same reduction by a chain of partial results.
        const int partials = most_partials(terms, reduction);
        const size_t stride =
            partial_stride((count + 128) * 8 * partials, partials, partial_size_of(dtype));
        std::vector<unsigned char> partial(partials * stride * partial_size_of(dtype));
        std::vector<unsigned char> next(partial.size());
        kernels.accumulate(partial.data(), nullptr, pointers[0], 0, stride, count);
        for (int s = 1; s < terms - 1; ++s) {
          kernels.accumulate(next.data(), partial.data(), pointers[s], s, stride, count);
          next.swap(partial);
        }
        std::memset(result, 0, count * sizeof(T));
        kernels.finish(result, partial.data(), pointers[terms - 1], terms, stride, count);
        check(result);
      }

      std::vector<void*> in_place;
      for (const void* pointer : pointers) in_place.push_back(const_cast<void*>(pointer));
      kernels.reduce_in_place(in_place.data(), terms, random() % terms, count);
      for (void* each : in_place) check(static_cast<unsigned char*>(each));
    }
  }
}

// Rank order and tree order differ from four terms on: 2^24 + 1 rounds to 2^24.
void test_orders(Isa isa) {
  const std::vector<float> terms = {0x1p24f, 0, 1, 1, 1, 1, 1, 1};
  std::vector<const void*> sources;
  for (const float& term : terms) sources.push_back(&term);
  for (int n = 1; n <= 8; ++n) {
    float in_rank_order, in_tree_order;
    const auto reduce = [&](Reduction reduction, float* sum) {
      reduce_kernels(DType::kFloat32, reduction, isa).reduce(sum, sources.data(), n, 1);
    };
    reduce(Reduction::kSum, &in_rank_order);
    reduce(Reduction::kTreeSum, &in_tree_order);
    CHECK(in_rank_order == 0x1p24f);
    CHECK((in_tree_order == in_rank_order) == (n < 4));
  }
}

// The reductions that each kind of dtype has.
void test_which() {
  for (int code = 0; code < kDTypes; ++code) {
    const auto dtype = static_cast<DType>(code);
    const auto has = [&](Reduction reduction) { return has_reduce_kernels(dtype, reduction); };
    const bool is_complex =
        dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
    const bool is_narrow = dtype >= DType::kFloat8E4M3Fn;
    CHECK(has(Reduction::kSum) == !is_narrow);
    CHECK(has(Reduction::kAvg) == (is_floating(dtype) || is_complex));
    CHECK(has(Reduction::kMax) == !(is_narrow || is_complex));
    CHECK(has(Reduction::kXor) == !(is_narrow || is_complex || is_floating(dtype)));
  }
}

// Bools are "or" and "and"; complex numbers are summed as pairs.
void test_bool_and_complex(Isa isa) {
  const uint8_t a[] = {0, 1, 0, 1}, b[] = {0, 0, 1, 1};
  uint8_t result[4];
  const void* bools[] = {a, b};
  const auto reduced = [&](Reduction reduction) {
    reduce_kernels(DType::kBool, reduction, isa).reduce(result, bools, 2, 4);
    return result[0] << 3 | result[1] << 2 | result[2] << 1 | result[3];
  };
  CHECK(reduced(Reduction::kSum) == 7 && reduced(Reduction::kMax) == 7);
  CHECK(reduced(Reduction::kProduct) == 1 && reduced(Reduction::kMin) == 1);
  CHECK(reduced(Reduction::kXor) == 6);
  std::vector<float> x(202), y(202), sum(202);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i);
    y[i] = 0.5f * static_cast<float>(i * i);
  }
  const void* terms[] = {x.data(), y.data()};
  reduce_kernels(DType::kComplex64, Reduction::kAvg, isa).reduce(sum.data(), terms, 2, 101);
  for (size_t i = 0; i < x.size(); ++i) CHECK(sum[i] == (x[i] + y[i]) / 2);
}

// What is on the stack after each term, and how many bytes of a slot each partial result has.
void test_partials() {
  const auto after = [](int terms) { return partials_after(terms, Reduction::kTreeSum); };
  CHECK(after(0) == 0 && after(1) == 1 && after(7) == 3 && after(8) == 1);
  CHECK(partials_after(0, Reduction::kSum) == 0 && partials_after(7, Reduction::kSum) == 1);
  for (int ranks = 2; ranks <= 1024; ++ranks) {
    int most = 0;
    for (int terms = 1; terms < ranks; ++terms) most = std::max(most, after(terms));
    CHECK(most_partials(ranks, Reduction::kTreeAvg) == most);
    CHECK(most_partials(ranks, Reduction::kAvg) == 1);
  }
  CHECK(partial_stride(1000, 3, 4) == 64 && partial_stride(1024, 1, 8) == 128);
}

// A reduction of one term returns every 16-bit value unchanged.
template <class T>
void test_all_values(DType dtype, Isa isa) {
  std::vector<T> values(1 << 16), result(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<uint16_t>(i);
  const void* source = values.data();
  reduce_kernels(dtype, Reduction::kMax, isa).reduce(result.data(), &source, 1, values.size());
  for (size_t i = 0; i < values.size(); ++i) CHECK(same_value(values[i], result[i]));
}

// Sums of two floats of different magnitudes cover every case of rounding.
template <class T>
void test_rounding(DType dtype, Isa isa, int mantissa_bits) {
  const size_t count = 1 << 16;
  std::vector<T> large(count), small(count), result(count);
  for (int exponent = -12; exponent <= 12; exponent += 2) {
    for (size_t i = 0; i < count; ++i) {
      large[i].bits = static_cast<uint16_t>(i);
      const float value = Element<T>::widen(large[i]);
      small[i] = Element<T>::narrow(std::ldexp(std::isfinite(value) ? value : 1.f, exponent));
    }
    const void* sources[] = {large.data(), small.data()};
    reduce_kernels(dtype, Reduction::kSum, isa).reduce(result.data(), sources, 2, count);
    for (size_t i = 0; i < count; ++i) {
      const float sum = Element<T>::widen(large[i]) + Element<T>::widen(small[i]);
      CHECK(same_value(result[i], T{narrow(sum, mantissa_bits)}));
    }
  }
}

}  // namespace

int main() {
  CHECK(narrow(65519.f, 10) == 0x7bff && narrow(65520.f, 10) == 0x7c00);
  CHECK(narrow(std::ldexp(1.f, -25), 10) == 0 && narrow(std::ldexp(3.f, -25), 10) == 2);
  CHECK(widen(0x3c00, 10) == 1.f && widen(0x3f80, 7) == 1.f && narrow(-1.f, 7) == 0xbf80);
  test_partials();
  test_which();
  std::mt19937_64 random(1);
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (!isa_available(isa)) continue;
    test_reduce<double>(DType::kFloat64, isa, random);
    test_reduce<float>(DType::kFloat32, isa, random);
    test_reduce<Fp16>(DType::kFloat16, isa, random);
    test_reduce<Bf16>(DType::kBFloat16, isa, random);
    test_reduce<int32_t>(DType::kInt32, isa, random);
    test_reduce<int64_t>(DType::kInt64, isa, random);
    test_reduce<int16_t>(DType::kInt16, isa, random);
    test_reduce<int8_t>(DType::kInt8, isa, random);
    test_reduce<uint8_t>(DType::kUInt8, isa, random);
    test_reduce<uint16_t>(DType::kUInt16, isa, random);
    test_reduce<uint32_t>(DType::kUInt32, isa, random);
    test_reduce<uint64_t>(DType::kUInt64, isa, random);
    test_bool_and_complex(isa);
    test_orders(isa);
    test_all_values<Fp16>(DType::kFloat16, isa);
    test_all_values<Bf16>(DType::kBFloat16, isa);
    test_rounding<Fp16>(DType::kFloat16, isa, 10);
    test_rounding<Bf16>(DType::kBFloat16, isa, 7);
  }
  return 0;
}
