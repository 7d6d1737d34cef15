// Products of a few rows: with whole numbers, whose sums are exact in any order, every instruction
// set gives the exact result, rounded once; with others, a row's bits depend neither on the other
// rows nor on threads; nothing but the result is written.
#include "pipekernels/products/few_rows.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "openmp.h"
#include "pipekernels/elements/elements.h"

namespace {

using namespace pipekernels;

constexpr Isa kIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};
constexpr DType kFloats[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};

template <class Type>
std::vector<typename Type::Element> random_elements(int64_t count, uint64_t seed, bool whole) {
  using Accumulator = typename Type::Accumulator;
  std::mt19937_64 random(seed);
  std::vector<typename Type::Element> elements(count);
  for (auto& element : elements) {
    const int number = static_cast<int>(random() % 17) - 8;
    element = Type::narrow(whole ? static_cast<Accumulator>(number)
                                 : static_cast<Accumulator>(random() % 2001) / 1000 - 1);
  }
  return elements;
}

template <class Type>
void test_exact(DType dtype, Isa isa, int64_t rows, int64_t columns, int64_t inner, bool biased) {
  const auto x = random_elements<Type>(rows * inner, 1, true);
  const auto weight = random_elements<Type>(columns * inner, 2, true);
  const auto bias = random_elements<Type>(columns, 3, true);
  const auto guard = Type::narrow(77);
  for (const int threads : {1, 3}) {
    std::vector<typename Type::Element> out(rows * columns + 2, guard);
    few_rows_product({&out[1], x.data(), weight.data(), biased ? bias.data() : nullptr, rows,
                      columns, inner, dtype},
                     threads, isa);
    CHECK(out.front() == guard && out.back() == guard);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < columns; ++i) {
        typename Type::Accumulator sum = biased ? Type::widen(bias[i]) : 0;
        for (int64_t j = 0; j < inner; ++j) {
          sum += Type::widen(x[r * inner + j]) * Type::widen(weight[i * inner + j]);
        }
        CHECK(Type::widen(out[1 + r * columns + i]) == Type::widen(Type::narrow(sum)));
      }
    }
  }
}

template <class Type>
void test_rows_are_independent(DType dtype, Isa isa) {
  constexpr int64_t kColumns = 37, kInner = 1003;
  const auto x = random_elements<Type>(kMaxFewRows * kInner, 4, false);
  const auto weight = random_elements<Type>(kColumns * kInner, 5, false);
  std::vector<typename Type::Element> alone(kColumns), all(kMaxFewRows * kColumns);
  few_rows_product(
      {all.data(), x.data(), weight.data(), nullptr, kMaxFewRows, kColumns, kInner, dtype}, 4, isa);
  for (int64_t r = 0; r < kMaxFewRows; ++r) {
    few_rows_product(
        {alone.data(), &x[r * kInner], weight.data(), nullptr, 1, kColumns, kInner, dtype}, 1, isa);
    CHECK(std::memcmp(alone.data(), &all[r * kColumns], kColumns * size_of(dtype)) == 0);
  }
}

void test_bad_arguments() {
  float x[8] = {}, out[8];
  for (const FewRows& bad : {FewRows{out, x, x, nullptr, 0, 1, 1, DType::kFloat32},
                             FewRows{out, x, x, nullptr, kMaxFewRows + 1, 1, 1, DType::kFloat32},
                             FewRows{out, x, x, nullptr, 1, 1, 1, DType::kInt32}}) {
    bool thrown = false;
    try {
      few_rows_product(bad, 1);
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  }
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) continue;
    for (const DType dtype : kFloats) {
      with_floating_element(dtype, [&](auto type) {
        using Type = decltype(type);
        for (int64_t rows = 1; rows <= kMaxFewRows; ++rows) {
          for (const int64_t inner : {1, 5, 16, 31, 64, 259, 1100}) {
            test_exact<Type>(dtype, isa, rows, inner == 64 ? 700 : 9, inner, inner % 2 == 1);
          }
        }
        test_rows_are_independent<Type>(dtype, isa);
      });
    }
  }
  test_bad_arguments();
}
