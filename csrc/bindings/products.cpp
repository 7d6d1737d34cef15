// Python bindings of products on the CPU.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "bindings.h"
#include "gil.h"
#include "pipekernels/host/dlpack.h"
#include "pipekernels/host/dlpack_tensor.h"
#include "pipekernels/products/few_rows.h"
#include "tensor.h"

namespace pipekernels::python {
namespace {

// Describes a contiguous CPU tensor that holds its elements.
bool describe_dense(py::handle tensor, dlpack::Tensor& described) {
  return describe(tensor, described) && described.device_type == dlpack::kCpu &&
         dlpack::dense_elements(described) >= 0 && holds_elements(tensor, described);
}

const std::byte* address_of(const dlpack::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.data) + tensor.offset;
}

bool same_dtype(const dlpack::Tensor& a, const dlpack::Tensor& b) {
  return a.type_code == b.type_code && a.type_bits == b.type_bits && a.type_lanes == b.type_lanes;
}

// few_rows_product(out, x, weight, bias, threads) -> bool: out = x @ weight.T + bias, with
// `bias` a tensor or None. Does nothing and returns False unless all are contiguous CPU tensors of
// one floating dtype whose shapes fit, with 1 to kMaxFewRows rows. Defined without pybind11, whose
// call overhead is as long as a small product.
PyObject* few_rows_product(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "expected (out, x, weight, bias, threads)");
    return nullptr;
  }
  try {
    const py::handle out = arguments[0];
    dlpack::Tensor to, x, weight, bias;
    const bool has_bias = arguments[3] != Py_None;
    if (!describe_dense(out, to) || !describe_dense(arguments[1], x) ||
        !describe_dense(arguments[2], weight) ||
        (has_bias && !describe_dense(arguments[3], bias))) {
      Py_RETURN_FALSE;
    }
    const int dtype = dtype_of(x);
    if (dtype < 0 || !is_floating(static_cast<DType>(dtype)) || !same_dtype(x, to) ||
        !same_dtype(x, weight) || (has_bias && !same_dtype(x, bias)) || weight.dims != 2 ||
        x.dims < 1) {
      Py_RETURN_FALSE;
    }
    const int64_t inner = weight.shape[1], columns = weight.shape[0];
    if (inner < 1 || columns < 1 || x.shape[x.dims - 1] != inner) Py_RETURN_FALSE;
    const int64_t rows = dlpack::dense_elements(x) / inner;
    if (rows < 1 || rows > kMaxFewRows || dlpack::dense_elements(to) != rows * columns ||
        (has_bias && dlpack::dense_elements(bias) != columns)) {
      Py_RETURN_FALSE;
    }
    const long threads = PyLong_AsLong(arguments[4]);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    {
      const NoGil no_gil;
      pipekernels::few_rows_product(
          {const_cast<std::byte*>(address_of(to)), address_of(x), address_of(weight),
           has_bias ? address_of(bias) : nullptr, rows, columns, inner, static_cast<DType>(dtype)},
          static_cast<int>(threads));
    }
    mark_changed(out);
    Py_RETURN_TRUE;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef few_rows_method = {
    "few_rows_product",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&few_rows_product)), METH_FASTCALL,
    nullptr};

}  // namespace

void bind_products(py::module_& m) {
  m.attr("FEW_ROWS") = kMaxFewRows;
  PyObject* const function = PyCFunction_New(&few_rows_method, nullptr);
  if (function == nullptr) throw py::error_already_set();
  m.attr("few_rows_product") = py::reinterpret_steal<py::object>(function);
}

}  // namespace pipekernels::python
