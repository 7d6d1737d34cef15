// Copies between tensors and shared memory.
#pragma once

#include <cstddef>
#include <cstring>

namespace pipekernels {

// As memcpy; where there is nothing to copy, the pointers may be null, and both may be the same.
inline void copy_bytes(void* destination, const void* source, size_t bytes) {
  if (bytes > 0 && destination != source) std::memcpy(destination, source, bytes);
}

}  // namespace pipekernels
