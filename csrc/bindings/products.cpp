// Python bindings of products on the CPU.

#include "products.h"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "bindings.h"
#include "gil.h"
#include "pipekernels/host/dlpack.h"
#include "pipekernels/host/dlpack_tensor.h"
#include "pipekernels/products/expert_product.h"
#include "pipekernels/products/skinny_gemm.h"
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

bool is_int8(const dlpack::Tensor& tensor) {
  return tensor.type_code == dlpack::kInt && tensor.type_bits == 8 && tensor.type_lanes == 1;
}

DType partial_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace

bool read_product(const dlpack::Tensor& out, const dlpack::Tensor& x, const dlpack::Tensor& weight,
                  bool partial, SkinnyGemm& product) {
  const int dtype = dtype_of(x);
  if (dtype < 0 || !is_floating(static_cast<DType>(dtype)) || dtype_of(weight) != dtype ||
      weight.dims != 2 || x.dims < 1) {
    return false;
  }
  product.dtype = static_cast<DType>(dtype);
  const DType result = partial ? partial_dtype(product.dtype) : product.dtype;
  product.columns = weight.shape[0];
  product.inner = weight.shape[1];
  if (dtype_of(out) != static_cast<int>(result) || product.inner < 1 || product.columns < 1 ||
      x.shape[x.dims - 1] != product.inner) {
    return false;
  }
  product.rows = dlpack::dense_elements(x) / product.inner;
  product.out = const_cast<std::byte*>(address_of(out));
  product.x = address_of(x);
  product.weight = address_of(weight);
  return product.rows >= 1 && product.rows <= kMaxSkinnyRows &&
         dlpack::dense_elements(out) == product.rows * product.columns;
}

bool read_bias(const dlpack::Tensor& bias, SkinnyGemm& product) {
  product.bias = address_of(bias);
  return dtype_of(bias) == static_cast<int>(product.dtype) &&
         dlpack::dense_elements(bias) == product.columns;
}

namespace {

// Calls `body`, with C++ exceptions as Python's.
template <class Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Both functions below take (out, x, weight, third, threads). They do nothing and return False
// unless read_product(). They are defined without pybind11, whose call overhead is as long as a
// small product. `body(product, third, threads)` says whether it applied.
template <class Body>
PyObject* call_product(PyObject* const* arguments, Py_ssize_t count, bool partial,
                       const Body& body) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, partial ? "expected (out, x, weight, slabs, threads)"
                                             : "expected (out, x, weight, bias, threads)");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    SkinnyGemm product{};
    dlpack::Tensor out, x, weight;
    if (!describe_dense(arguments[0], out) || !describe_dense(arguments[1], x) ||
        !describe_dense(arguments[2], weight) || !read_product(out, x, weight, partial, product)) {
      Py_RETURN_FALSE;
    }
    const long threads = PyLong_AsLong(arguments[4]);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    if (!body(product, arguments[3], static_cast<int>(threads))) Py_RETURN_FALSE;
    mark_changed(arguments[0]);
    Py_RETURN_TRUE;
  });
}

// skinny_gemm(out, x, weight, bias, threads) -> bool: out = x @ weight.T + bias, with `bias`
// a tensor of the same dtype or None.
PyObject* skinny_gemm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call_product(arguments, count, false,
                      [](SkinnyGemm& product, PyObject* third, int threads) {
                        if (third != Py_None) {
                          dlpack::Tensor bias;
                          if (!describe_dense(third, bias) || !read_bias(bias, product))
                            return false;
                        }
                        const NoGil no_gil;
                        pipekernels::skinny_gemm(product, threads);
                        return true;
                      });
}

// skinny_gemm_partial(out, x, weight, slabs, threads) -> bool: out = x @ weight.T in the dtype
// that sums are taken in.
PyObject* skinny_gemm_partial(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call_product(arguments, count, true,
                      [](const SkinnyGemm& product, PyObject* third, int threads) {
                        const long long slabs = PyLong_AsLongLong(third);
                        if (slabs == -1 && PyErr_Occurred()) throw py::error_already_set();
                        const NoGil no_gil;
                        pipekernels::skinny_gemm_partial(product, slabs, threads);
                        return true;
                      });
}

}  // namespace

bool read_experts(const ExpertOperands& operands, ExpertProduct& product) {
  const auto [out, x, weight, bias, chosen, scale] = operands;
  const bool is_single = chosen == nullptr;
  const int dtype = dtype_of(*x);
  if (dtype < 0 || !is_floating(static_cast<DType>(dtype)) || dtype_of(*out) != dtype ||
      !(scale == nullptr ? dtype_of(*weight) == dtype : is_int8(*weight)) ||
      !(is_single || dtype_of(*chosen) == static_cast<int>(DType::kInt64)) ||
      (is_single && scale == nullptr) || weight->dims != (is_single ? 2 : 3) || x->dims < 1) {
    return false;
  }
  if (scale != nullptr) {
    const bool is_supported =
        dtype == static_cast<int>(DType::kFloat32) || dtype == static_cast<int>(DType::kBFloat16);
    if (!is_supported || dtype_of(*scale) != static_cast<int>(DType::kFloat32) ||
        dlpack::dense_elements(*scale) * weight->shape[weight->dims - 1] !=
            dlpack::dense_elements(*weight)) {
      return false;
    }
    product.scales = reinterpret_cast<const float*>(address_of(*scale));
  }
  product.dtype = static_cast<DType>(dtype);
  static constexpr int64_t kFirst[kMaxSkinnyRows] = {};
  product.experts = is_single ? 1 : weight->shape[0];
  product.columns = weight->shape[weight->dims - 2];
  product.inner = weight->shape[weight->dims - 1];
  if (product.columns < 1 || product.inner < 1) return false;
  product.rows = dlpack::dense_elements(*x) / product.inner;
  product.pairs = is_single ? product.rows : dlpack::dense_elements(*chosen);
  product.chosen = is_single ? kFirst : reinterpret_cast<const int64_t*>(address_of(*chosen));
  if (product.pairs < 1 || (is_single && product.rows > kMaxSkinnyRows) ||
      x->shape[x->dims - 1] != product.inner ||
      dlpack::dense_elements(*out) != product.pairs * product.columns) {
    return false;
  }
  if (bias != nullptr) {
    if (dtype_of(*bias) != dtype ||
        dlpack::dense_elements(*bias) != product.experts * product.columns) {
      return false;
    }
    product.bias = address_of(*bias);
  }
  product.out = const_cast<std::byte*>(address_of(*out));
  product.x = address_of(*x);
  product.weight = address_of(*weight);
  return product.rows >= 1 && product.pairs % product.rows == 0;
}

namespace {

// expert_product(out, x, weight, bias, chosen, threads[, scale]) -> bool
//
// out[p] = weight[chosen[p]] @ x[row of p] + bias[chosen[p]]; with `scale`, weight * scale in place
// of an int8 weight. It does nothing and returns False unless read_experts().
PyObject* expert_product(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 6 && count != 7) {
    PyErr_SetString(PyExc_TypeError, "expected (out, x, weight, bias, chosen, threads[, scale])");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    dlpack::Tensor described[6];
    const dlpack::Tensor* given[6] = {};
    PyObject* const scale = count == 7 ? arguments[6] : Py_None;
    PyObject* const operands[6] = {arguments[0], arguments[1], arguments[2],
                                   arguments[3], arguments[4], scale};
    for (int i = 0; i < 6; ++i) {
      if (i >= 3 && operands[i] == Py_None) continue;
      if (!describe_dense(operands[i], described[i])) Py_RETURN_FALSE;
      given[i] = &described[i];
    }
    ExpertProduct product{};
    if (!read_experts({given[0], given[1], given[2], given[3], given[4], given[5]}, product)) {
      Py_RETURN_FALSE;
    }
    const long threads = PyLong_AsLong(arguments[5]);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    {
      const NoGil no_gil;
      pipekernels::expert_product(product, static_cast<int>(threads));
    }
    mark_changed(arguments[0]);
    Py_RETURN_TRUE;
  });
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

template <FastCall function>
void define(py::module_& m, const char* name) {
  static PyMethodDef method{name,
                            reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                            METH_FASTCALL, nullptr};
  PyObject* const made = PyCFunction_New(&method, nullptr);
  if (made == nullptr) throw py::error_already_set();
  m.attr(name) = py::reinterpret_steal<py::object>(made);
}

}  // namespace

void bind_products(py::module_& m) {
  m.attr("FEW_ROWS") = kMaxSkinnyRows;
  define<&skinny_gemm>(m, "skinny_gemm");
  define<&skinny_gemm_partial>(m, "skinny_gemm_partial");
  define<&expert_product>(m, "expert_product");
}

}  // namespace pipekernels::python
