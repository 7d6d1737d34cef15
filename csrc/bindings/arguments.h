// Checks of the addresses, counts and codes that Python passes as integers. They cannot check
// whether there is memory at an address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "pipekernels/collectives/call.h"
#include "pipekernels/elements/dtype.h"

namespace pipekernels::python {

// Out of line, to keep the checks in short calls small.
[[noreturn, gnu::cold, gnu::noinline]] inline void reject(const std::string& name,
                                                          const std::string& wanted,
                                                          const std::string& got) {
  throw std::invalid_argument(name + " must be " + wanted + ", got " + got);
}

[[noreturn, gnu::cold, gnu::noinline]] inline void reject_range(const char* name, int64_t value,
                                                                int64_t least, int64_t most) {
  reject(name, "in " + std::to_string(least) + ".." + std::to_string(most), std::to_string(value));
}

[[noreturn, gnu::cold, gnu::noinline]] inline void reject_count(size_t count, DType dtype,
                                                                int parts, size_t most) {
  reject(
      "count",
      "at most " + std::to_string(most) + " for " + std::to_string(parts) + " x " + name_of(dtype),
      std::to_string(count));
}

[[noreturn, gnu::cold, gnu::noinline]] inline void reject_address(const char* name,
                                                                  uintptr_t pointer, size_t bytes) {
  reject(name, "the address of " + std::to_string(bytes) + " bytes", std::to_string(pointer));
}

inline void check_in_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) reject_range(name, value, least, most);
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

constexpr uint32_t kMaxShape = (1 << kShapeBits) - 1;

inline uint32_t checked_shape(uint32_t digest) {
  check_in_range("shape", digest, 0, kMaxShape);
  return digest;
}

constexpr size_t kMaxBytes = size_t{1} << 56;  // No process can address more.

inline void* address(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

// The address of `parts` times `count` elements. Throws std::invalid_argument if they do not fit
// into the address space from there.
inline void* address_of(const char* name, uintptr_t pointer, size_t count, DType dtype,
                        int parts = 1) {
  const size_t unit = size_of(dtype) * parts;
  size_t bytes;
  if (__builtin_mul_overflow(count, unit, &bytes) || bytes > kMaxBytes) {
    reject_count(count, dtype, parts, kMaxBytes / unit);
  }
  if (bytes > 0 && (pointer == 0 || pointer > UINTPTR_MAX - bytes)) {
    reject_address(name, pointer, bytes);
  }
  return address(pointer);
}

}  // namespace pipekernels::python
