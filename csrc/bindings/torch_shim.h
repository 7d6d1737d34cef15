// The parts of torch's C interface for extensions that this package uses, found in the torch that
// the process has loaded. Its functions keep their names and meaning in later versions.
// Source: torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <type_traits>

#include "pipekernels/host/dlpack.h"

namespace pipekernels::torch_shim {

using Tensor = struct OpaqueTensor*;

// An argument or a result of an operator: an integer, a Tensor that its receiver owns, or, for an
// argument that may be None, null or a pointer to a Value that its receiver deletes.
using Value = uint64_t;

// Finds its arguments at `values`, and leaves its results there.
using Kernel = void (*)(Value* values, uint64_t arguments, uint64_t results);

// Arguments and results are passed as in torch 2.10, the first that has all functions below.
constexpr uint64_t kVersion = uint64_t{2} << 56 | uint64_t{10} << 48;

// Their names and parameters; each returns 0 unless it fails.
#define PIPEKERNELS_TORCH_FUNCTIONS(F)                                                    \
  F(aoti_torch_library_init_impl, const char* name, const char* key, const char* file,    \
    uint32_t line, void** library)                                                        \
  F(torch_library_impl, void* library, const char* name, Kernel kernel, uint64_t version) \
  F(aoti_torch_empty_strided, int64_t dims, const int64_t* sizes, const int64_t* strides, \
    int32_t dtype, int32_t device_type, int32_t device, Tensor* made)                     \
  F(aoti_torch_delete_tensor_object, Tensor tensor)                                       \
  F(torch_get_const_data_ptr, Tensor tensor, const void** data)                           \
  F(aoti_torch_get_dim, Tensor tensor, int64_t* dims)                                     \
  F(aoti_torch_get_sizes, Tensor tensor, int64_t** sizes)                                 \
  F(aoti_torch_get_strides, Tensor tensor, int64_t** strides)                             \
  F(aoti_torch_get_dtype, Tensor tensor, int32_t* dtype)                                  \
  F(torch_get_num_threads, uint32_t* threads)

#define DECLARE(name, ...) inline int32_t (*name)(__VA_ARGS__) = nullptr;
PIPEKERNELS_TORCH_FUNCTIONS(DECLARE)
#undef DECLARE

inline bool is_found = false;  // Whether torch has all of them.

inline bool find_functions() {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  bool found = torch != nullptr;
#define FIND(name, ...) \
  found = found && (name = reinterpret_cast<decltype(name)>(dlsym(torch, #name)));
  PIPEKERNELS_TORCH_FUNCTIONS(FIND)
#undef FIND
  return is_found = found;
}

// Owns a reference to a tensor, or null.
struct Release {
  void operator()(Tensor tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using OwnedTensor = std::unique_ptr<std::remove_pointer_t<Tensor>, Release>;

// A tensor's dtype is a c10::ScalarType, a number that files of torch contain.
struct Type {
  int32_t dtype;
  dlpack::TypeCode code;
  uint8_t bits;
};
constexpr Type kTypes[] = {
    {7, dlpack::kFloat, 64},   {6, dlpack::kFloat, 32},   {5, dlpack::kFloat, 16},
    {15, dlpack::kBfloat, 16}, {1, dlpack::kInt, 8},      {2, dlpack::kInt, 16},
    {3, dlpack::kInt, 32},     {4, dlpack::kInt, 64},     {0, dlpack::kUnsigned, 8},
    {11, dlpack::kBool, 8},    {9, dlpack::kComplex, 64}, {10, dlpack::kComplex, 128}};

// Null for types that are not in the table.
inline const Type* type_of(int32_t dtype) {
  for (const Type& type : kTypes) {
    if (type.dtype == dtype) return &type;
  }
  return nullptr;
}
inline const Type* type_of(const dlpack::Tensor& tensor) {
  for (const Type& type : kTypes) {
    if (tensor.type_lanes == 1 && tensor.type_code == type.code && tensor.type_bits == type.bits) {
      return &type;
    }
  }
  return nullptr;
}

}  // namespace pipekernels::torch_shim
