// Test data for collectives, and their reductions.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {

using Bytes = std::vector<std::byte>;

// Random elements of a reducible dtype, determined by `seed` and `rank`.
inline Bytes values(DType dtype, size_t count, uint64_t seed, int rank) {
  std::mt19937_64 random(seed * 64 + rank);
  Bytes bytes(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const int value = static_cast<int>(random() % 2001) - 1000;
    const auto put = [&](auto v) { std::memcpy(bytes.data() + i * sizeof(v), &v, sizeof(v)); };
    switch (dtype) {
      case DType::kFloat64:
        put(value * 1.1);
        break;
      case DType::kFloat32:
        put(value * 1.1f);
        break;
      case DType::kFloat16:  // Any bits, including subnormals, infinities and NaNs.
        put(static_cast<uint16_t>(random()));
        break;
      case DType::kBFloat16: {
        const float f = value * 1.1f;
        uint32_t bits;
        std::memcpy(&bits, &f, sizeof(bits));
        put(static_cast<uint16_t>(bits >> 16));
        break;
      }
      case DType::kInt32:
        put(static_cast<int32_t>(value * 2000003));
        break;
      default:
        put(value * (int64_t{1} << 40));
    }
  }
  return bytes;
}

// The reduction by the CPU's baseline kernels.
inline Bytes reduced(const std::vector<Bytes>& inputs, DType dtype, Reduction reduction) {
  std::vector<const void*> sources;
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes result(inputs[0].size());
  reduce_kernels(dtype, reduction, Isa::kBaseline)
      .reduce(result.data(), sources.data(), static_cast<int>(inputs.size()),
              result.size() / size_of(dtype));
  return result;
}

inline bool equal(const std::byte* data, const Bytes& expected) {
  return expected.empty() || std::memcmp(data, expected.data(), expected.size()) == 0;
}

}  // namespace pipekernels
