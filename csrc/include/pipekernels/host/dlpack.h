// The parts of DLPack's binary interface that this package uses.
// Source: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipekernels::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };
enum TypeCode : uint8_t {
  kInt = 0,
  kUnsigned = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6
};

struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t offset;   // bytes
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*release)(ManagedTensor*);
};

// The functions that a library provides for its tensor class, in a capsule that is the class's
// attribute `__dlpack_c_exchange_api__`.
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;  // of an older major version
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Describes the tensor `object`; the description is valid while the tensor lives and does not
  // change. Returns -1 and sets a Python exception if it cannot be described. May be null.
  int (*from_object)(void* object, Tensor* described);
  void* current_work_stream;
};

static_assert(offsetof(Tensor, shape) == 24 && sizeof(ManagedTensor) == 64);
static_assert(offsetof(ExchangeApi, from_object) == 40);

}  // namespace pipekernels::dlpack
