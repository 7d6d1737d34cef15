// Checks of the addresses, counts and codes that Python passes as bare integers. Whether there is
// memory at an address, nobody can check.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "pipekernels/call.h"
#include "pipekernels/dtype.h"

namespace pipekernels::python {

inline void check_in_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw std::invalid_argument(std::string(name) + " must be in " + std::to_string(least) + ".." +
                              std::to_string(most) + ", got " + std::to_string(value));
}

inline DType dtype_of_code(int code) {
  check_in_range("dtype", code, 0, kDTypes - 1);
  return static_cast<DType>(code);
}

inline Reduction reduction_of_code(int code) {
  check_in_range("reduction", code, 0, kReductions - 1);
  return static_cast<Reduction>(code);
}

inline Algorithm algorithm_of_code(int code) {
  check_in_range("algorithm", code, 0, kAlgorithms - 1);
  return static_cast<Algorithm>(code);
}

constexpr uint32_t kMostShape = (1 << kShapeBits) - 1;

inline uint32_t checked_shape(uint32_t digest) {
  check_in_range("shape", digest, 0, kMostShape);
  return digest;
}

constexpr size_t kMostBytes = size_t{1} << 56;  // No process can address more.

inline void* address(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

// Where `parts` times `count` elements begin. Throws std::invalid_argument if they can lie nowhere.
inline void* address_of(const char* name, uintptr_t pointer, size_t count, DType dtype,
                        int parts = 1) {
  const size_t part_bytes = size_of(dtype) * parts;
  if (count > kMostBytes / part_bytes) {
    throw std::invalid_argument("count must be at most " + std::to_string(kMostBytes / part_bytes) +
                                " for " + std::to_string(parts) + " x " + name_of(dtype) +
                                ", got " + std::to_string(count));
  }
  if (count > 0 && (pointer == 0 || pointer > UINTPTR_MAX - count * part_bytes)) {
    throw std::invalid_argument(std::string(name) + " must be the address of " +
                                std::to_string(count * part_bytes) + " bytes, got " +
                                std::to_string(pointer));
  }
  return address(pointer);
}

}  // namespace pipekernels::python
