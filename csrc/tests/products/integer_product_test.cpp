// Products of integers: every instruction set gives the bits of the definition, written here in
// plain loops, for 8 and 4 bits, all dtypes of scales, with and without zeros, groups that do not
// fill the inner dimension, and any number of rows and threads. A pair with an expert has the bits
// of a product with the expert's matrix alone. Nothing but the result is written.
#include "pipekernels/products/integer_product.h"

#include <algorithm>
#include <cmath>
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

// A matrix in plain order, and as kernels read it.
struct Matrix {
  std::vector<uint8_t> plain;          // [columns][inner]
  std::vector<uint8_t> packed, zeros;  // zeros: [tile][group][16]
  std::vector<float> scales;           // the same, exact in scale_dtype
  std::vector<uint16_t> half_scales;
  IntegerMatrix described{};

  Matrix(int bits, int64_t columns, int64_t inner, int64_t group, DType scale_dtype, bool zeroed,
         uint64_t seed, int64_t experts = 1) {
    std::mt19937_64 random(seed);
    IntegerMatrix& m = described;
    m.columns = columns;
    m.inner = inner;
    m.group = group;
    m.bits = bits;
    m.scale_dtype = scale_dtype;
    plain.resize(experts * columns * inner);
    for (uint8_t& value : plain) value = random() % (1 << bits);
    packed.assign(experts * m.tiles() * m.tile_bytes(), 0);
    for (int64_t e = 0; e < experts; ++e) pack(e);
    scales.resize(experts * m.tiles() * m.groups() * kIntegerTile);
    zeros.resize(scales.size());
    half_scales.resize(scales.size());
    for (size_t i = 0; i < scales.size(); ++i) {
      const float scale = static_cast<float>(random() % 1000) / 7e4f * (i % 5 == 0 ? -1 : 1);
      if (scale_dtype == DType::kFloat16) half_scales[i] = Fp16Element::narrow(scale * 1e-3f);
      if (scale_dtype == DType::kBFloat16) half_scales[i] = Bf16Element::narrow(scale);
      scales[i] = scale_dtype == DType::kFloat32   ? scale
                  : scale_dtype == DType::kFloat16 ? Fp16Element::widen(half_scales[i])
                                                   : Bf16Element::widen(half_scales[i]);
      zeros[i] = zeroed ? random() % (1 << bits) : 1 << (bits - 1);
    }
    m.values = packed.data();
    m.scales = scale_dtype == DType::kFloat32 ? static_cast<const void*>(scales.data())
                                              : half_scales.data();
    m.zeros = zeroed ? zeros.data() : nullptr;
  }

  void pack(int64_t e) {
    const IntegerMatrix& m = described;
    for (int64_t i = 0; i < m.columns; ++i) {
      for (int64_t j = 0; j < m.inner; ++j) {
        const uint8_t value = plain[(e * m.columns + i) * m.inner + j];
        const int64_t tile = e * m.tiles() + i / kIntegerTile, block = j / kIntegerStep;
        const int64_t quad = j % kIntegerStep / 4, place = i % kIntegerTile * 4 + j % 4;
        uint8_t* const base =
            &packed[tile * m.tile_bytes() + block * kIntegerStep * kIntegerTile * m.bits / 8];
        if (m.bits == 8) {
          base[quad * 64 + place] = value;
        } else {
          base[quad % 4 * 64 + place] |= quad < 4 ? value : value << 4;
        }
      }
    }
  }
};

// The definition, of one row with matrix `e`.
float product(const Matrix& matrix, int64_t e, int64_t i, const float* x) {
  const IntegerMatrix& m = matrix.described;
  float total = 0;
  for (int64_t j = 0; j < m.inner; j += m.block()) {
    const int64_t end = std::min(m.inner, j + m.block());
    float most = 0;
    bool is_finite = true;
    for (int64_t k = j; k < end; ++k) {
      is_finite = is_finite && std::isfinite(x[k]);
      most = std::max(most, std::fabs(x[k]));
    }
    const int64_t place =
        ((e * m.tiles() + i / kIntegerTile) * m.groups() + j / m.group) * kIntegerTile +
        i % kIntegerTile;
    float x_scale = is_finite ? most / 127 : std::numeric_limits<float>::quiet_NaN();
    const bool is_zero = !is_finite || most < 0x1p-100f;
    if (is_finite && is_zero) x_scale = 0;
    int32_t sum = 0;
    for (int64_t k = j; k < end && !is_zero; ++k) {
      const auto rounded = static_cast<int32_t>(std::nearbyint(x[k] * (127 / most)));
      sum += (matrix.plain[(e * m.columns + i) * m.inner + k] - matrix.zeros[place]) * rounded;
    }
    total = std::fma(static_cast<float>(sum), matrix.scales[place] * x_scale, total);
  }
  return total;
}

std::vector<float> random_rows(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 300;
  }
  return values;
}

void test_float32(const Matrix& matrix, int64_t rows, bool biased, int threads, IntegerIsa isa) {
  const IntegerMatrix& m = matrix.described;
  const auto x = random_rows(rows * m.inner, 1), bias = random_rows(m.columns, 2);
  std::vector<float> out(rows * m.columns + 2, 77);
  integer_product({&out[1], x.data(), biased ? bias.data() : nullptr, rows, DType::kFloat32}, m,
                  threads, isa);
  CHECK(out.front() == 77 && out.back() == 77);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < m.columns; ++i) {
      const float sum = product(matrix, 0, i, &x[r * m.inner]) + (biased ? bias[i] : 0);
      CHECK(out[1 + r * m.columns + i] == sum);
    }
  }
}

void test_bfloat16(const Matrix& matrix, int64_t rows, IntegerIsa isa) {
  const IntegerMatrix& m = matrix.described;
  auto x = random_rows(rows * m.inner, 3), bias = random_rows(m.columns, 4);
  std::vector<uint16_t> x16, bias16, out(rows * m.columns);
  for (float& value : x) value = Bf16Element::widen(x16.emplace_back(Bf16Element::narrow(value)));
  for (float& value : bias)
    value = Bf16Element::widen(bias16.emplace_back(Bf16Element::narrow(value)));
  integer_product({out.data(), x16.data(), bias16.data(), rows, DType::kBFloat16}, m, 1, isa);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < m.columns; ++i) {
      const float sum = product(matrix, 0, i, &x[r * m.inner]) + bias[i];
      CHECK(out[r * m.columns + i] == Bf16Element::narrow(sum));
    }
  }
}

void test_sizes(IntegerIsa isa) {
  uint64_t seed = 0;
  for (const int bits : {8, 4}) {
    for (const int64_t inner : {1, 31, 32, 96, 200}) {
      for (const int64_t group : {int64_t{32}, int64_t{64}, std::max<int64_t>(inner, 1)}) {
        for (const bool zeroed : {false, true}) {
          const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
          const int64_t columns = 1 + ++seed % 3 * 18;
          const Matrix matrix(bits, columns, inner, group, dtypes[seed % 3], zeroed, seed);
          const int64_t rows = 1 + 7 * seed % 37;
          test_float32(matrix, rows, zeroed, 1 + static_cast<int>(seed % 3), isa);
          test_bfloat16(matrix, rows, isa);
        }
      }
    }
  }
}

// More rows and more of the inner dimension than a kernel takes at a time.
void test_large(IntegerIsa isa) {
  uint64_t seed = 20;
  for (const int bits : {8, 4}) {
    for (const int64_t group : {32, 64, 96, 128, 256, 1100}) {
      const bool zeroed = ++seed % 2 == 0;
      const Matrix matrix(bits, 18, 1100, group, DType::kBFloat16, zeroed, seed);
      test_float32(matrix, 12 + group % 5 * 70, true, 2, isa);
    }
  }
}

// A block is what divides a group, and never more than a group.
void test_blocks() {
  const int64_t expected[][3] = {{32, 320, 32},   {64, 320, 64},  {96, 320, 32},
                                 {128, 320, 128}, {192, 320, 64}, {256, 320, 128},
                                 {320, 320, 128}, {96, 96, 128},  {640, 320, 128}};
  for (const auto& [group, inner, block] : expected) {
    IntegerMatrix matrix{};
    matrix.group = group;
    matrix.inner = inner;
    CHECK(matrix.block() == block);
  }
}

// Products of extremes, whose pairs would not fit into 16 bits.
void test_extremes(IntegerIsa isa) {
  for (const uint8_t value : {uint8_t{0}, uint8_t{255}}) {
    Matrix matrix(8, 16, 64, 64, DType::kFloat32, false, 5);
    std::fill(matrix.plain.begin(), matrix.plain.end(), value);
    std::fill(matrix.packed.begin(), matrix.packed.end(), value);
    for (const float sign : {1.f, -1.f}) {
      const std::vector<float> x(64, sign * 3);
      std::vector<float> out(16);
      integer_product({out.data(), x.data(), nullptr, 1, DType::kFloat32}, matrix.described, 1,
                      isa);
      for (int64_t i = 0; i < 16; ++i) CHECK(out[i] == product(matrix, 0, i, x.data()));
    }
  }
}

// A row with a NaN or an infinity is NaN, and no other; tiny and zero blocks are zeros.
void test_special_values(IntegerIsa isa) {
  const Matrix matrix(4, 20, 100, 32, DType::kFloat32, true, 6);
  for (const float special :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e-40f}) {
    auto x = random_rows(300, 7);
    x[150] = special;
    if (special < 1) std::fill(&x[100], &x[200], special);
    std::vector<float> out(60);
    integer_product({out.data(), x.data(), nullptr, 3, DType::kFloat32}, matrix.described, 1, isa);
    for (int64_t i = 0; i < 60; ++i) {
      if (i / 20 == 1 && special < 1) CHECK(out[i] == 0);
      if (i / 20 == 1 && !(special < 1)) CHECK(std::isnan(out[i]));
      if (i / 20 != 1) CHECK(out[i] == product(matrix, 0, i % 20, &x[i / 20 * 100]));
    }
  }
}

void test_experts(IntegerIsa isa) {
  constexpr int64_t kExperts = 5, kRows = 7, kPerRow = 3, kColumns = 37, kInner = 70;
  constexpr int64_t kPairs = kRows * kPerRow;
  for (const int bits : {8, 4}) {
    const Matrix matrix(bits, kColumns, kInner, 32, DType::kFloat16, true, 8, kExperts);
    const auto x = random_rows(kRows * kInner, 9), bias = random_rows(kExperts * kColumns, 10);
    std::mt19937_64 random(11);
    std::vector<int64_t> chosen(kPairs);
    for (int64_t& expert : chosen) expert = random() % kExperts;
    std::vector<float> out(kPairs * kColumns);
    const IntegerProduct described{out.data(), x.data(), bias.data(), kRows, DType::kFloat32};
    integer_expert_product(described, matrix.described, chosen.data(), kPairs, kExperts, 3, isa);
    for (int64_t p = 0; p < kPairs; ++p) {
      for (int64_t i = 0; i < kColumns; ++i) {
        const float sum = product(matrix, chosen[p], i, &x[p / kPerRow * kInner]);
        CHECK(out[p * kColumns + i] == sum + bias[chosen[p] * kColumns + i]);
      }
    }
  }
}

template <class Call>
bool is_refused(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_errors() {
  Matrix matrix(8, 16, 64, 32, DType::kFloat32, false, 12);
  const std::vector<float> x(2 * 64);
  std::vector<float> out(4 * 16);
  IntegerProduct described{out.data(), x.data(), nullptr, 2, DType::kFloat32};
  const IntegerMatrix& m = matrix.described;
  const auto refused = [&](IntegerProduct p, IntegerMatrix bad) {
    return is_refused([&] { integer_product(p, bad, 1); });
  };
  IntegerMatrix bad = m;
  bad.bits = 5;
  CHECK(refused(described, bad));
  for (const int64_t group : {0, 16, 48}) {
    bad = m;
    bad.group = group;
    CHECK(refused(described, bad));
  }
  bad = m;
  bad.scale_dtype = DType::kFloat64;
  CHECK(refused(described, bad));
  described.dtype = DType::kFloat16;
  CHECK(refused(described, m));
  described.dtype = DType::kFloat32;
  for (const int64_t expert : {-1, 1}) {
    const int64_t chosen[] = {0, expert};
    CHECK(is_refused([&] { integer_expert_product(described, m, chosen, 2, 1, 1); }));
  }
  const int64_t chosen[] = {0, 0, 0};
  CHECK(is_refused([&] { integer_expert_product(described, m, chosen, 3, 1, 1); }));
}

}  // namespace

int main() {
  for (const IntegerIsa isa : kIntegerIsas) {
    if (!integer_isa_available(isa)) continue;
    test_sizes(isa);
    test_large(isa);
    test_extremes(isa);
    test_special_values(isa);
    test_experts(isa);
  }
  test_blocks();
  test_errors();
}
