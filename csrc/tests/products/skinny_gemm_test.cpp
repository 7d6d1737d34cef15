// Products of a few rows: with whole numbers, whose sums are exact in any order, every instruction
// set gives the exact result, rounded once; with others, a row's bits depend neither on the other
// rows nor on threads; nothing but the result is written. Partial products of several slabs have
// the bits of those of half as many, added.
#include "pipekernels/products/skinny_gemm.h"

#include <cstdint>
#include <cstring>
#include <limits>
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
  auto transpose = weight;
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t j = 0; j < inner; ++j) transpose[j * columns + i] = weight[i * inner + j];
  }
  const auto guard = Type::narrow(77);
  for (const int run : {0, 1, 2, 3}) {
    const bool transposed = run & 1;
    const int threads = run & 2 ? 3 : 1;
    std::vector<typename Type::Element> out(rows * columns + 2, guard);
    skinny_gemm({&out[1], x.data(), transposed ? transpose.data() : weight.data(),
                 biased ? bias.data() : nullptr, rows, columns, inner, dtype, transposed},
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
  const auto x = random_elements<Type>(kMaxSkinnyRows * kInner, 4, false);
  const auto weight = random_elements<Type>(kColumns * kInner, 5, false);
  std::vector<typename Type::Element> alone(kColumns), all(kMaxSkinnyRows * kColumns);
  for (const bool transposed : {false, true}) {
    skinny_gemm({all.data(), x.data(), weight.data(), nullptr, kMaxSkinnyRows, kColumns, kInner,
                 dtype, transposed},
                4, isa);
    for (int64_t r = 0; r < kMaxSkinnyRows; ++r) {
      skinny_gemm({alone.data(), &x[r * kInner], weight.data(), nullptr, 1, kColumns, kInner, dtype,
                   transposed},
                  1, isa);
      CHECK(std::memcmp(alone.data(), &all[r * kColumns], kColumns * size_of(dtype)) == 0);
    }
  }
}

// Slabs begin to end - 1 of `slabs` of a tensor of `rows` rows.
template <class Element>
std::vector<Element> slabs_of(const std::vector<Element>& all, int64_t rows, int64_t slabs,
                              int64_t begin, int64_t end) {
  const int64_t row = all.size() / rows, slab = row / slabs;
  std::vector<Element> some;
  for (int64_t r = 0; r < rows; ++r) {
    const auto start = all.begin() + r * row;
    some.insert(some.end(), start + begin * slab, start + end * slab);
  }
  return some;
}

// The sum over slabs begin to end - 1 as the documentation defines it, each by its own call.
template <class Type>
std::vector<typename Type::Accumulator> tree_sum(DType dtype, Isa isa, int64_t rows,
                                                 const std::vector<typename Type::Element>& x,
                                                 const std::vector<typename Type::Element>& weight,
                                                 int64_t slabs, int64_t begin, int64_t end) {
  const int64_t inner = x.size() / rows, columns = weight.size() / inner;
  std::vector<typename Type::Accumulator> sums(rows * columns);
  if (end - begin == 1) {
    const auto x_slab = slabs_of(x, rows, slabs, begin, end);
    const auto weight_slab = slabs_of(weight, columns, slabs, begin, end);
    skinny_gemm_partial({sums.data(), x_slab.data(), weight_slab.data(), nullptr, rows, columns,
                         inner / slabs, dtype},
                        1, 1, isa);
    return sums;
  }
  const int64_t middle = (begin + end) / 2;
  sums = tree_sum<Type>(dtype, isa, rows, x, weight, slabs, begin, middle);
  const auto right = tree_sum<Type>(dtype, isa, rows, x, weight, slabs, middle, end);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += right[i];
  return sums;
}

template <class Type>
void test_slabs(DType dtype, Isa isa, int64_t rows, int64_t slab, int64_t slabs) {
  using Accumulator = typename Type::Accumulator;
  constexpr int64_t kColumns = 13;
  const int64_t inner = slab * slabs;
  const auto x = random_elements<Type>(rows * inner, 6, false);
  const auto weight = random_elements<Type>(kColumns * inner, 7, false);
  const auto expected = tree_sum<Type>(dtype, isa, rows, x, weight, slabs, 0, slabs);
  const Accumulator guard = 77;
  for (const int threads : {1, 3}) {
    std::vector<Accumulator> out(rows * kColumns + 2, guard);
    skinny_gemm_partial({&out[1], x.data(), weight.data(), nullptr, rows, kColumns, inner, dtype},
                        slabs, threads, isa);
    CHECK(out.front() == guard && out.back() == guard);
    CHECK(std::memcmp(&out[1], expected.data(), expected.size() * sizeof(Accumulator)) == 0);
  }
  if (slabs > 1) return;
  // Rounded, the sum over one slab is the whole product.
  std::vector<typename Type::Element> whole(rows * kColumns);
  skinny_gemm({whole.data(), x.data(), weight.data(), nullptr, rows, kColumns, inner, dtype}, 1,
              isa);
  for (size_t i = 0; i < whole.size(); ++i) CHECK(whole[i] == Type::narrow(expected[i]));
}

// Rows of the weight are long enough for several pieces.
template <class Type>
void test_slabs_in_pieces(DType dtype, Isa isa) {
  constexpr int64_t kColumns = 300, kSlab = 333, kSlabs = 8;
  const auto x = random_elements<Type>(kSlab * kSlabs, 8, false);
  const auto weight = random_elements<Type>(kColumns * kSlab * kSlabs, 9, false);
  const auto expected = tree_sum<Type>(dtype, isa, 1, x, weight, kSlabs, 0, kSlabs);
  std::vector<typename Type::Accumulator> out(kColumns);
  skinny_gemm_partial(
      {out.data(), x.data(), weight.data(), nullptr, 1, kColumns, kSlab * kSlabs, dtype}, kSlabs, 4,
      isa);
  CHECK(std::memcmp(out.data(), expected.data(), kColumns * sizeof(out[0])) == 0);
}

// A NaN in the second row of the weight, which follows the first one in memory, shows in its
// results only, and with all bits set.
template <class Type>
void test_nan(DType dtype, Isa isa, int64_t inner, int64_t slabs) {
  using Accumulator = typename Type::Accumulator;
  const auto x = random_elements<Type>(inner, 10, true);
  auto weight = random_elements<Type>(2 * inner, 11, true);
  Accumulator out[2], expected[2] = {};
  for (int64_t j = 0; j < inner; ++j) expected[0] += Type::widen(x[j]) * Type::widen(weight[j]);
  std::memset(&expected[1], 0xff, sizeof(expected[1]));
  weight[inner] = Type::narrow(std::numeric_limits<Accumulator>::quiet_NaN());
  skinny_gemm_partial({out, x.data(), weight.data(), nullptr, 1, 2, inner, dtype}, slabs, 1, isa);
  CHECK(std::memcmp(out, expected, sizeof(out)) == 0);
}

template <class Call>
void check_throws(const Call& call) {
  bool thrown = false;
  try {
    call();
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  CHECK(thrown);
}

void test_bad_arguments() {
  float x[8] = {}, out[8];
  for (const SkinnyGemm& bad :
       {SkinnyGemm{out, x, x, nullptr, 0, 1, 1, DType::kFloat32},
        SkinnyGemm{out, x, x, nullptr, kMaxSkinnyRows + 1, 1, 1, DType::kFloat32},
        SkinnyGemm{out, x, x, nullptr, 1, 1, 1, DType::kInt32}}) {
    check_throws([&] { skinny_gemm(bad, 1); });
    check_throws([&] { skinny_gemm_partial(bad, 1, 1); });
  }
  const SkinnyGemm good{out, x, x, nullptr, 1, 1, 8, DType::kFloat32};
  for (const int64_t slabs : {0, -2, 3, 16}) {
    check_throws([&] { skinny_gemm_partial(good, slabs, 1); });
  }
  const SkinnyGemm biased{out, x, x, x, 1, 1, 8, DType::kFloat32};
  check_throws([&] { skinny_gemm_partial(biased, 1, 1); });
  const SkinnyGemm transposed{out, x, x, nullptr, 1, 1, 8, DType::kFloat32, true};
  check_throws([&] { skinny_gemm_partial(transposed, 1, 1); });
}

}  // namespace

int main() {
  for (const Isa isa : kIsas) {
    if (!isa_available(isa)) continue;
    for (const DType dtype : kFloats) {
      with_floating_element(dtype, [&](auto type) {
        using Type = decltype(type);
        for (int64_t rows = 1; rows <= kMaxSkinnyRows; ++rows) {
          for (const int64_t inner : {1, 5, 16, 31, 64, 259, 1100}) {
            test_exact<Type>(dtype, isa, rows, inner == 64 ? 700 : 9, inner, inner % 2 == 1);
          }
          for (const int64_t slab : {1, 2, 7, 16, 33, 43, 64, 173}) {
            for (const int64_t slabs : {1, 2, 4, 8}) {
              test_slabs<Type>(dtype, isa, rows, slab, slabs);
            }
          }
        }
        test_rows_are_independent<Type>(dtype, isa);
        test_slabs_in_pieces<Type>(dtype, isa);
        test_nan<Type>(dtype, isa, 35, 1);
        test_nan<Type>(dtype, isa, 8 * 37, 8);
      });
    }
  }
  test_bad_arguments();
}
