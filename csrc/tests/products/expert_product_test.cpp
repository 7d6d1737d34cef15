// Products with experts: each pair has the bits of a product of one row with its expert's matrix,
// for any routing and any number of threads; nothing but the result is written.
#include "pipekernels/products/expert_product.h"

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

void test_bad_arguments() {
  float x[8] = {}, out[8];
  const int64_t chosen[2] = {0, 2}, negative[2] = {0, -1}, good[2] = {0, 1};
  for (const ExpertProduct& bad :
       {ExpertProduct{out, x, x, nullptr, chosen, 2, 2, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, negative, 2, 2, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, good, 2, 0, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, good, 2, 3, 2, 1, 1, DType::kFloat32},
        ExpertProduct{out, x, x, nullptr, good, 2, 2, 2, 1, 1, DType::kInt32}}) {
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
  }
  test_bad_arguments();
  return 0;
}
