// Conversions between floating-point types: every instruction set produces the values of
// convert_element(), these are correct, and kernels write only the elements.
#include "pipekernels/elements/cast.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "check.h"
#include "pipekernels/elements/elements.h"

namespace {

using namespace pipekernels;

template <class Type>
using ElementsOf = std::vector<typename Type::Element>;

// Test values: all of a 16-bit type; of a wider type, all signs and exponents with mantissas that
// are random, halfway between two values of a narrower type, or one unit from halfway.
template <class Type>
ElementsOf<Type> elements() {
  using Element = typename Type::Element;
  ElementsOf<Type> found;
  if constexpr (sizeof(Element) == 2) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) found.push_back(static_cast<Element>(bits));
  } else {
    using Bits = std::conditional_t<sizeof(Element) == 4, uint32_t, uint64_t>;
    constexpr int kMantissa = sizeof(Element) == 4 ? 23 : 52;
    constexpr Bits kMask = (Bits{1} << kMantissa) - 1;
    std::mt19937_64 random(1);
    for (Bits high = 0; high < Bits{1} << (8 * sizeof(Element) - kMantissa); ++high) {
      const auto add = [&](Bits mantissa) {
        found.push_back(bits_as<Element>(high << kMantissa | (mantissa & kMask)));
      };
      for (int i = 0; i < 20; ++i) add(static_cast<Bits>(random()));
      for (const int kept : {7, 10, 23}) {
        if (kept >= kMantissa) continue;
        const Bits half = Bits{1} << (kMantissa - kept - 1);
        for (int i = 0; i < 10; ++i) {
          const Bits cut = static_cast<Bits>(random()) & ~(2 * half - 1);
          for (const Bits mantissa : {cut, cut + half - 1, cut + half, cut + half + 1}) {
            add(mantissa);
          }
        }
        add(kMask);
      }
    }
  }
  return found;
}

// Compares bits, but all NaNs are equal.
template <class Type>
bool same_value(typename Type::Element a, typename Type::Element b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0 ||
         (std::isnan(Type::widen(a)) && std::isnan(Type::widen(b)));
}

template <class From, class To>
void test_values(DType from, DType to, Isa isa) {
  const ElementsOf<From> source = elements<From>();
  ElementsOf<To> result(source.size());
  cast_kernel(from, to, isa)(result.data(), source.data(), source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    CHECK(same_value<To>(result[i], convert_element<From, To>(source[i])));
  }
}

// Works for any count and alignment, and writes nothing outside the elements.
template <class From, class To>
void test_counts_and_alignments(DType from, DType to, Isa isa) {
  constexpr size_t kFrom = sizeof(typename From::Element), kTo = sizeof(typename To::Element);
  std::mt19937_64 random(2);
  for (size_t count = 0; count < 70; ++count) {
    const size_t before = random() % 20, from_at = random() % 20;
    std::vector<char> source(from_at + count * kFrom), result(before + count * kTo + 20, 'x');
    for (char& byte : source) byte = static_cast<char>(random() % 64);  // No NaN among them.
    std::vector<char> expected = result;
    for (size_t i = 0; i < count; ++i) {
      typename From::Element element;
      std::memcpy(&element, source.data() + from_at + i * kFrom, kFrom);
      const auto converted = convert_element<From, To>(element);
      std::memcpy(expected.data() + before + i * kTo, &converted, kTo);
    }
    cast_kernel(from, to, isa)(result.data() + before, source.data() + from_at, count);
    CHECK(result == expected);
  }
}

void test_every_cast(Isa isa) {
  for (int i = 0; i < kFloatingDTypes; ++i) {
    for (int k = 0; k < kFloatingDTypes; ++k) {
      const auto from = static_cast<DType>(i), to = static_cast<DType>(k);
      if (from == to) continue;
      with_floating_element(from, [&](auto source) {
        with_floating_element(to, [&](auto target) {
          test_values<decltype(source), decltype(target)>(from, to, isa);
          test_counts_and_alignments<decltype(source), decltype(target)>(from, to, isa);
        });
      });
    }
  }
}

// The value of a 16-bit float, computed from its definition.
double value_of(uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const double significand =
      mantissa + (exponent > 0 ? static_cast<double>(1 << mantissa_bits) : 0.0);
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits);
}

// Widening is exact. Narrowing rounds to nearest, ties to even.
template <class Type>
void test_rounding(int mantissa_bits) {
  using Single = ElementOf<DType::kFloat32>;
  using Double = ElementOf<DType::kFloat64>;
  const uint16_t infinity = 0x8000 - (1 << mantissa_bits);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto element = static_cast<uint16_t>(bits);
    const double value = value_of(element, mantissa_bits);
    const float single = convert_element<Type, Single>(element);
    const double twice = convert_element<Type, Double>(element);
    if (std::isnan(value)) {
      CHECK(std::isnan(single) && std::isnan(twice));
      CHECK(std::isnan(value_of(convert_element<Single, Type>(single), mantissa_bits)));
      continue;
    }
    CHECK(single == value && twice == value && std::signbit(single) == (bits >= 0x8000));
    CHECK((convert_element<Single, Type>(single)) == element);
    CHECK((convert_element<Double, Type>(value)) == element);
    if ((bits & 0x7fff) >= infinity) continue;
    // The next value away from zero; infinity counts as the next power of two.
    const auto next = static_cast<uint16_t>(bits + 1);
    const double beyond = (next & 0x7fff) == infinity
                              ? 2 * value - value_of(static_cast<uint16_t>(bits - 1), mantissa_bits)
                              : value_of(next, mantissa_bits);
    const auto middle = static_cast<float>((value + beyond) / 2);
    const auto up = std::copysign(std::numeric_limits<float>::infinity(), middle);
    const auto narrowed = [](float v) { return convert_element<Single, Type>(v); };
    CHECK(narrowed(middle) == (bits % 2 == 0 ? element : next));
    CHECK(narrowed(std::nextafter(middle, 0.0f)) == element);
    CHECK(narrowed(std::nextafter(middle, up)) == next);
  }
}

}  // namespace

int main() {
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (isa_available(isa)) test_every_cast(isa);
  }
  test_rounding<Fp16Element>(10);
  test_rounding<Bf16Element>(7);
}
