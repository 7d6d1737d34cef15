// Access to tensors, which are Python objects.
//
// Their addresses, sizes and dtypes come from torch's table of C functions for DLPack, or else from
// their Python attributes. Everything here requires the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/dlpack.h"
#include "pipekernels/host/dlpack_tensor.h"

namespace pipekernels::python {

namespace py = pybind11;

using Integers = std::vector<int64_t>;

// torch's function that describes a tensor to C; null before torch 2.10.
inline int (*describe_tensor)(void* object, dlpack::Tensor* described) = nullptr;
inline PyTypeObject *tensor_class = nullptr, *parameter_class = nullptr;

// A Python function that takes a tuple of tensors and tells autograd that they changed in place.
inline PyObject* increment_version = nullptr;

inline void use_tensors(const py::type& cls, const py::type& parameter,
                        const py::object& increment) {
  const auto is_tensor_class = [&](const py::type& other) {
    return PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(other.ptr()),
                            reinterpret_cast<PyTypeObject*>(cls.ptr()));
  };
  if (!is_tensor_class(parameter) || !PyCallable_Check(increment.ptr())) {
    throw py::type_error("expected the class of tensors, a subclass of it, and a function");
  }
  describe_tensor = nullptr;
  tensor_class = reinterpret_cast<PyTypeObject*>(cls.inc_ref().ptr());
  parameter_class = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
  increment_version = increment.inc_ref().ptr();
  if (!py::hasattr(cls, "__dlpack_c_exchange_api__")) return;
  const py::capsule capsule = cls.attr("__dlpack_c_exchange_api__");
  const auto* api = capsule.get_pointer<const dlpack::ExchangeApi>();
  if (api->major == 1) describe_tensor = api->from_object;
}

// Raises TypeError if `object` is not a tensor.
inline void require_tensor(py::handle object) {
  if (tensor_class == nullptr) {
    throw std::runtime_error("call use_tensors() first, which sets the class of tensors");
  }
  if (PyObject_TypeCheck(object.ptr(), tensor_class)) return;
  throw py::type_error("expected a tensor, got " +
                       py::str(py::type::of(object).attr("__name__")).cast<std::string>());
}

// Whether the data_ptr() of a tensor that is not empty may be only an offset in a storage that was
// freed. Real addresses are hardly ever that low.
inline bool is_low(const void* data) {
  return reinterpret_cast<uintptr_t>(data) < uintptr_t{1} << 32;
}

// Whether a tensor that is not empty has memory; `data` is its data_ptr(). Asks the storage, which
// is slow, only if it must.
inline bool has_memory(py::handle tensor, const void* data) {
  if (!is_low(data)) return true;
  return data != nullptr && tensor.attr("untyped_storage")().attr("data_ptr")().cast<uintptr_t>();
}

// Throws std::invalid_argument if a tensor that is not empty has no memory.
inline void check_memory(py::handle tensor) {
  require_tensor(tensor);
  const auto* data = reinterpret_cast<void*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  if (has_memory(tensor, data) || tensor.attr("numel")().cast<int64_t>() == 0) return;
  const auto name = py::str(py::type::of(tensor).attr("__name__")).cast<std::string>();
  const auto shape = py::str(py::tuple(py::list(tensor.attr("shape")))).cast<std::string>();
  throw std::invalid_argument(
      "the " + name + " of shape " + shape +
      " has no memory of its own: it wraps other tensors, or its storage was freed; pass the "
      "wrapped tensor (of a DTensor: tensor.to_local())");
}

// Describes a tensor. Returns false, without a Python exception, for objects whose class is not
// exactly torch.Tensor or Parameter, that torch cannot describe, or that have no memory, such as
// the wrappers of torch's tracers and transforms.
inline bool describe(py::handle object, dlpack::Tensor& described) {
  const PyTypeObject* const cls = Py_TYPE(object.ptr());
  if (cls != tensor_class && cls != parameter_class) return false;
  if (describe_tensor == nullptr) return false;
  if (describe_tensor(object.ptr(), &described) == 0) {
    return has_memory(object, described.data) || is_empty(described);
  }
  PyErr_Clear();
  return false;
}

// Whether a tensor's memory holds its elements themselves, not their negatives or conjugates.
inline bool holds_elements(py::handle tensor, const dlpack::Tensor& described) {
  static PyObject* const is_negative = PyUnicode_InternFromString("is_neg");
  static PyObject* const is_conjugate = PyUnicode_InternFromString("is_conj");
  const auto is = [&](PyObject* method) {
    const auto result =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), method));
    if (!result) throw py::error_already_set();
    return result.ptr() != Py_False;
  };
  if (is(is_negative)) return false;
  return described.type_code != dlpack::kComplex || !is(is_conjugate);
}

// Tells autograd that a tensor has changed in place, in case it was saved for a backward.
inline void mark_changed(py::handle tensor) {
  const py::tuple changed = py::make_tuple(tensor);
  const auto done =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(increment_version, changed.ptr()));
  if (done) return;
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw py::error_already_set();
  PyErr_Clear();  // Inference tensors have no version.
}

// The same as shape_digest() in pipekernels/comm/tensors.py, of a tuple of sizes.
inline uint32_t shape_digest(const py::tuple& sizes) {
  return sizes.size() == 1 ? 0 : static_cast<uint32_t>(py::hash(sizes) & kMaxShape);
}

// The properties of a tensor; strides are in elements.
struct TensorView {
  char* data;
  int device_type;    // a dlpack::DeviceType, or 0 for other devices
  int device;         // the index of the device
  int64_t item_size;  // bytes
  int dtype;          // see dtype_of()
  Integers shape, strides;
};

inline TensorView view_of(py::handle tensor) {
  dlpack::Tensor described;
  if (describe(tensor, described)) {
    const auto copy = [&](const int64_t* values) {
      return Integers(values, values + described.dims);
    };
    return {static_cast<char*>(described.data) + described.offset,
            described.device_type,
            described.device,
            described.type_bits * described.type_lanes / 8,
            dtype_of(described),
            copy(described.shape),
            copy(described.strides)};
  }
  check_memory(tensor);
  auto* const data = reinterpret_cast<char*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  const auto name = py::str(tensor.attr("dtype")).cast<std::string>();
  int dtype = kReducibleDTypes - 1;
  while (dtype >= 0 && name != std::string("torch.") + name_of(static_cast<DType>(dtype))) --dtype;
  const auto is = [&](const char* name) { return tensor.attr(name).cast<bool>(); };
  const int device_type = is("is_cpu") ? dlpack::kCpu : is("is_cuda") ? dlpack::kCuda : 0;
  const int device = device_type == dlpack::kCuda ? tensor.attr("get_device")().cast<int>() : 0;
  return {data,
          device_type,
          device,
          tensor.attr("element_size")().cast<int64_t>(),
          dtype,
          tensor.attr("shape").cast<Integers>(),
          tensor.attr("stride")().cast<Integers>()};
}

}  // namespace pipekernels::python
