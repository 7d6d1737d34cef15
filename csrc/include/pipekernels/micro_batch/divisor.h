// Division by a number that the host knows, in two multiplications' time on a GPU.
#pragma once

#include <cstdint>

#include "pipekernels/host/host_device.h"

namespace pipekernels {

// Divides numbers below 2^31. With 2^(shift-1) < value <= 2^shift, `magic` is 2^32 * 2^shift /
// value rounded up, less 2^32. What is rounded makes a quotient too large by less than 1 / value:
// never across an integer.
struct Divisor {
  uint32_t value;  // 1 to 2^31 - 1
  uint32_t magic;
  uint32_t shift;

  static Divisor by(uint32_t value) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < value) ++shift;
    const uint64_t above = (uint64_t{1} << shift) - value;
    return {value, static_cast<uint32_t>((above << 32) / value + 1), shift};
  }

  PK_HOST_DEVICE uint32_t quotient(uint32_t number) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(number, magic);
#else
    const auto high = static_cast<uint32_t>(uint64_t{number} * magic >> 32);
#endif
    return (high + number) >> shift;
  }
};

}  // namespace pipekernels
