// Copies between tensors and shared memory.
#pragma once

#include <cstddef>
#include <cstring>

namespace pipekernels {

// memcpy() that also accepts equal pointers, and null pointers if `bytes` is 0.
inline void copy_bytes(void* destination, const void* source, size_t bytes) {
  if (bytes > 0 && destination != source) std::memcpy(destination, source, bytes);
}

}  // namespace pipekernels
