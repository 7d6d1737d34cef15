// Products with experts: each pair has the bits of a product of one row with its expert's matrix,
// for any routing and any number of threads; nothing but the result is written. Those with weights
// of int8 equal sums in float64 within rounding.
#include "pipekernels/products/expert_product.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "openmp.h"
#include "pipekernels/products/skinny_gemm.h"

namespace {

using namespace pipekernels;

constexpr Isa kIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512};

std::vector<float> random_floats(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random() % 2001) / 1000 - 1;
  return values;
}

void test_pairs(Isa isa, int64_t experts, int64_t rows, int64_t per_row, bool biased) {
  constexpr int64_t kColumns = 137, kInner = 517;
  const auto x = random_floats(rows * kInner, 1);
  const auto weight = random_floats(experts * kColumns * kInner, 2);
  const auto bias = random_floats(experts * kColumns, 3);
  const int64_t pairs = rows * per_row;
  std::mt19937_64 random(4);
  std::vector<int64_t> chosen(pairs);
  for (int64_t& expert : chosen) expert = random() % experts;
  for (const int threads : {1, 3}) {
    std::vector<float> out(pairs * kColumns + 2, 77);
    expert_product({&out[1], x.data(), weight.data(), biased ? bias.data() : nullptr, chosen.data(),
                    pairs, rows, experts, kColumns, kInner, DType::kFloat32},
                   threads, isa);
    CHECK(out.front() == 77 && out.back() == 77);
    for (int64_t p = 0; p < pairs; ++p) {
      std::vector<float> alone(kColumns);
      skinny_gemm(
          {alone.data(), &x[p / per_row * kInner], &weight[chosen[p] * kColumns * kInner],
           biased ? &bias[chosen[p] * kColumns] : nullptr, 1, kColumns, kInner, DType::kFloat32},
          1, isa);
      CHECK(std::memcmp(&out[1 + p * kColumns], alone.data(), kColumns * sizeof(float)) == 0);
    }
  }
}

uint16_t bfloat16_of(float value) {  // Rounds to nearest even.
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

float float_of(uint16_t value) {
  const uint32_t word = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &word, sizeof(result));
  return result;
}

// Weights of int8, against sums in float64, within the rounding of a float32 sum in any order.
void test_int8(Isa isa, int64_t rows, int64_t inner, bool half, bool biased) {
  constexpr int64_t kColumns = 67, kExperts = 3;
  const auto x = random_floats(rows * inner, 1), scales = random_floats(kExperts * kColumns, 2);
  const auto bias = random_floats(kExperts * kColumns, 3);
  std::mt19937_64 random(4);
  std::vector<int8_t> weight(kExperts * kColumns * inner);
  for (int8_t& value : weight) value = static_cast<int8_t>(random() % 255) - 127;
  std::vector<int64_t> chosen(rows);
  for (int64_t& expert : chosen) expert = random() % kExperts;
  std::vector<uint16_t> half_x(x.size()), half_bias(bias.size());
  for (size_t i = 0; i < x.size(); ++i) half_x[i] = bfloat16_of(x[i]);
  for (size_t i = 0; i < bias.size(); ++i) half_bias[i] = bfloat16_of(bias[i]);
  for (const int threads : {1, 3}) {
    std::vector<float> out(rows * kColumns + 2, 77);
    std::vector<uint16_t> half_out(out.size(), 77);
    const void* const b = half ? static_cast<const void*>(half_bias.data()) : bias.data();
    ExpertProduct product{half ? static_cast<void*>(&half_out[1]) : &out[1],
                          half ? static_cast<const void*>(half_x.data()) : x.data(),
                          weight.data(),
                          biased ? b : nullptr,
                          chosen.data(),
                          rows,
                          rows,
                          kExperts,
                          kColumns,
                          inner,
                          half ? DType::kBFloat16 : DType::kFloat32,
                          scales.data()};
    expert_product(product, threads, isa);
    CHECK(half ? half_out.front() == 77 && half_out.back() == 77
               : out.front() == 77 && out.back() == 77);
    for (int64_t p = 0; p < rows * kColumns; ++p) {
      const int64_t column = chosen[p / kColumns] * kColumns + p % kColumns;
      double expected = 0, magnitude = 0;
      for (int64_t j = 0; j < inner; ++j) {
        const int64_t at = p / kColumns * inner + j;
        const double term = (half ? float_of(half_x[at]) : x[at]) *
                            static_cast<double>(weight[column * inner + j]) * scales[column];
        expected += term;
        magnitude += std::abs(term);
      }
      if (biased) expected += half ? float_of(half_bias[column]) : bias[column];
      const double found = half ? float_of(half_out[1 + p]) : out[1 + p];
      const double sums = (inner + 3) * std::ldexp(magnitude + std::abs(expected), -24);
      CHECK(std::abs(found - expected) <= sums + (half ? std::ldexp(std::abs(expected), -8) : 0));
    }
  }
}

void test_bad_arguments() {
  float x[8] = {}, out[8];
  const int64_t chosen[2] = {0, 2}, negative[2] = {0, -1}, good[2] = {0, 1};
  for (const ExpertProduct& bad :
       {ExpertProduct{out, x, x, nullptr, chosen, 2, 2, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, negative, 2, 2, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, good, 2, 0, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, good, 2, 3, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, good, 2, 2, 2, 1, 1, DType::kInt32},
        ExpertProduct{out, x, x, nullptr, good, 2, 2, 2, 1, 1, DType::kFloat64, x}}) {
    bool thrown = false;
    try {
      expert_product(bad, 1);
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
    test_pairs(isa, 1, 9, 1, false);   // Three groups of one expert.
    test_pairs(isa, 8, 1, 2, true);    // A token.
    test_pairs(isa, 4, 7, 3, false);   // Groups of several sizes.
    test_pairs(isa, 16, 5, 16, true);  // More pairs than a group takes.
    for (const int64_t rows : {1, 2, 7, 16}) {
      for (const int64_t inner : {1, 15, 64, 515}) {
        test_int8(isa, rows, inner, false, rows % 2);
        test_int8(isa, rows, inner, true, rows % 2 == 0);
      }
    }
  }
  test_bad_arguments();
  return 0;
}
