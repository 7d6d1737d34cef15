// Properties of a tensor that DLPack describes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/dlpack.h"

namespace pipekernels::dlpack {

inline bool is_empty(const Tensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.dims, 0) != tensor.shape + tensor.dims;
}

// The code of its DType, or -1 for a dtype that can neither be cast nor reduced on all devices.
inline int dtype_of(const Tensor& tensor) {
  if (tensor.type_lanes != 1) return -1;
  switch (tensor.type_code << 8 | tensor.type_bits) {
    case kFloat << 8 | 64:
      return static_cast<int>(DType::kFloat64);
    case kFloat << 8 | 32:
      return static_cast<int>(DType::kFloat32);
    case kFloat << 8 | 16:
      return static_cast<int>(DType::kFloat16);
    case kBfloat << 8 | 16:
      return static_cast<int>(DType::kBFloat16);
    case kInt << 8 | 32:
      return static_cast<int>(DType::kInt32);
    case kInt << 8 | 64:
      return static_cast<int>(DType::kInt64);
    default:
      return -1;
  }
}

// The same for a dtype that can be reduced on CPUs.
inline int cpu_dtype_of(const Tensor& tensor) {
  constexpr int kFirst = kReducibleDTypes, kLast = static_cast<int>(DType::kUInt64);
  constexpr int kinds[] = {kInt,     kInt,     kUnsigned, kBool,     kComplex,
                           kComplex, kComplex, kUnsigned, kUnsigned, kUnsigned};
  static_assert(std::size(kinds) == kLast - kFirst + 1);
  int code = dtype_of(tensor);
  for (int i = kFirst; code < 0 && tensor.type_lanes == 1 && i <= kLast; ++i) {
    const size_t bits = 8 * size_of(static_cast<DType>(i));
    if (tensor.type_code == kinds[i - kFirst] && tensor.type_bits == bits) code = i;
  }
  return code;
}

// The number of elements of a contiguous tensor, or -1 if it is not contiguous.
inline int64_t dense_elements(const Tensor& tensor) {
  int64_t count = 1;
  for (int32_t d = tensor.dims - 1; d >= 0; --d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != count) return -1;
    count *= tensor.shape[d];
  }
  return count;
}

// Whether device, dtype and shape are equal, except for the size along `dim`.
inline bool same_but_for_size_along(int64_t dim, const Tensor& a, const Tensor& b) {
  if (a.device_type != b.device_type || a.device != b.device || a.dims != b.dims ||
      a.type_code != b.type_code || a.type_bits != b.type_bits || a.type_lanes != b.type_lanes) {
    return false;
  }
  for (int32_t d = 0; d < a.dims; ++d) {
    if (d != dim && a.shape[d] != b.shape[d]) return false;
  }
  return true;
}

}  // namespace pipekernels::dlpack
