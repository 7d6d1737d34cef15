// Memory that is handed to torch: a DLPack capsule that owns it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/dlpack.h"

namespace pipekernels::python {

// The bytes of a contiguous tensor; more than there can be if their number does not fit in 64 bits.
inline size_t bytes_of(const std::vector<int64_t>& sizes, DType dtype) {
  int64_t bytes = static_cast<int64_t>(size_of(dtype));
  bool fits = true;
  for (const int64_t size : sizes) {
    if (size < 0) {
      throw std::invalid_argument("sizes must not be negative, got " + std::to_string(size));
    }
    fits &= !__builtin_mul_overflow(bytes, size, &bytes);
  }
  return fits ? bytes : std::numeric_limits<int64_t>::max();
}

// The type and bits of a reducible dtype or of bytes, as all versions of torch read them.
inline std::pair<dlpack::TypeCode, uint8_t> dlpack_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kFloat16:
      return {dlpack::kFloat, bits};
    case DType::kBFloat16:
      return {dlpack::kBfloat, bits};
    case DType::kInt32:
    case DType::kInt64:
      return {dlpack::kInt, bits};
    case DType::kUInt8:
      return {dlpack::kUnsigned, bits};
    default:
      throw std::invalid_argument(std::string("no memory is allocated as ") + name_of(dtype) +
                                  "; allocate it as uint8");
  }
}

// A capsule of a contiguous tensor that owns `buffer`, which holds its elements.
template <class Buffer>
pybind11::object to_capsule(std::unique_ptr<Buffer> buffer, DType dtype, std::vector<int64_t> sizes,
                            dlpack::DeviceType device_type, int device) {
  struct Owned : dlpack::ManagedTensor {
    std::unique_ptr<Buffer> buffer;
    std::vector<int64_t> sizes;
  };
  const auto [code, bits] = dlpack_type(dtype);
  auto owned = std::make_unique<Owned>();
  owned->buffer = std::move(buffer);
  owned->sizes = std::move(sizes);
  owned->tensor = {owned->buffer->data(),
                   device_type,
                   device,
                   static_cast<int32_t>(owned->sizes.size()),
                   code,
                   bits,
                   1,
                   owned->sizes.data(),
                   nullptr,
                   0};
  owned->context = nullptr;
  owned->release = [](dlpack::ManagedTensor* self) { delete static_cast<Owned*>(self); };
  // A consumer renames the capsule and then releases the tensor itself.
  PyObject* capsule = PyCapsule_New(
      static_cast<dlpack::ManagedTensor*>(owned.get()), "dltensor", [](PyObject* self) {
        if (!PyCapsule_IsValid(self, "dltensor")) return;  // Consumed.
        auto* tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
        tensor->release(tensor);
      });
  if (capsule == nullptr) throw pybind11::error_already_set();
  owned.release();
  return pybind11::reinterpret_steal<pybind11::object>(capsule);
}

}  // namespace pipekernels::python
