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
#include "pipekernels/products/integer_product.h"
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

bool is_uint8(const dlpack::Tensor& tensor) {
  return tensor.type_code == dlpack::kUnsigned && tensor.type_bits == 8 && tensor.type_lanes == 1;
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
  const auto [out, x, weight, bias, chosen] = operands;
  const int dtype = dtype_of(*x);
  if (dtype < 0 || !is_floating(static_cast<DType>(dtype)) || dtype_of(*out) != dtype ||
      dtype_of(*weight) != dtype || dtype_of(*chosen) != static_cast<int>(DType::kInt64) ||
      weight->dims != 3 || x->dims < 1) {
    return false;
  }
  product.dtype = static_cast<DType>(dtype);
  product.experts = weight->shape[0];
  product.columns = weight->shape[1];
  product.inner = weight->shape[2];
  if (product.columns < 1 || product.inner < 1) return false;
  product.rows = dlpack::dense_elements(*x) / product.inner;
  product.pairs = dlpack::dense_elements(*chosen);
  product.chosen = reinterpret_cast<const int64_t*>(address_of(*chosen));
  if (product.pairs < 1 || x->shape[x->dims - 1] != product.inner ||
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

bool read_integers(const IntegerOperands& operands, IntegerCall& call) {
  const auto [out, x, values, scales, zeros, bias, chosen] = operands;
  const int dtype = dtype_of(*x), scale_dtype = dtype_of(*scales), first = chosen != nullptr;
  if ((dtype != static_cast<int>(DType::kFloat32) && dtype != static_cast<int>(DType::kBFloat16)) ||
      dtype_of(*out) != dtype || scale_dtype < 0 || !is_uint8(*values) || x->dims < 1 ||
      out->dims < 1 || values->dims != first + 3 || scales->dims != first + 3) {
    return false;
  }
  IntegerMatrix& matrix = call.matrix;
  matrix.values = reinterpret_cast<const uint8_t*>(address_of(*values));
  matrix.scales = address_of(*scales);
  matrix.columns = out->shape[out->dims - 1];
  matrix.inner = x->shape[x->dims - 1];
  matrix.scale_dtype = static_cast<DType>(scale_dtype);
  constexpr int64_t kStepBytes = kIntegerStep * kIntegerTile;
  matrix.bits = values->shape[first + 2] == kStepBytes ? 8 : 4;
  const int64_t groups = scales->shape[first + 1], steps = values->shape[first + 1];
  if (matrix.columns < 1 || matrix.inner < 1 || groups < 1 || steps % groups != 0 ||
      values->shape[first + 2] != kStepBytes * matrix.bits / 8 || steps != matrix.steps() ||
      values->shape[first] != matrix.tiles() || scales->shape[first] != matrix.tiles() ||
      scales->shape[first + 2] != kIntegerTile) {
    return false;
  }
  matrix.group = steps / groups * kIntegerStep;
  call.experts = first ? values->shape[0] : 1;
  if (zeros != nullptr) {
    if (!is_uint8(*zeros) || dlpack::dense_elements(*zeros) != dlpack::dense_elements(*scales)) {
      return false;
    }
    matrix.zeros = reinterpret_cast<const uint8_t*>(address_of(*zeros));
  }
  IntegerProduct& product = call.product;
  product.dtype = static_cast<DType>(dtype);
  product.rows = dlpack::dense_elements(*x) / matrix.inner;
  product.out = const_cast<std::byte*>(address_of(*out));
  product.x = address_of(*x);
  call.pairs = product.rows;
  if (first) {
    if (dtype_of(*chosen) != static_cast<int>(DType::kInt64)) return false;
    call.chosen = reinterpret_cast<const int64_t*>(address_of(*chosen));
    call.pairs = dlpack::dense_elements(*chosen);
  }
  if (bias != nullptr) {
    if (dtype_of(*bias) != dtype ||
        dlpack::dense_elements(*bias) != call.experts * matrix.columns) {
      return false;
    }
    product.bias = address_of(*bias);
  }
  return product.rows >= 1 && call.pairs % product.rows == 0 &&
         dlpack::dense_elements(*scales) == call.experts * matrix.tiles() * groups * kIntegerTile &&
         dlpack::dense_elements(*out) == call.pairs * matrix.columns;
}

void IntegerCall::run(int threads, IntegerIsa isa) const {
  if (chosen == nullptr) {
    integer_product(product, matrix, threads, isa);
  } else {
    integer_expert_product(product, matrix, chosen, pairs, experts, threads, isa);
  }
}

namespace {

// Calls a product of kTensors operands, of which those after the third may be None, and threads:
// `body(operands, threads)` says whether it applied. False also for operands without a description.
template <int kTensors, class Body>
PyObject* call_experts(PyObject* const* arguments, Py_ssize_t count, const Body& body) {
  if (count != kTensors + 1) {
    PyErr_Format(PyExc_TypeError, "expected %d tensors and the number of threads", kTensors);
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    dlpack::Tensor described[kTensors];
    const dlpack::Tensor* operands[kTensors] = {};
    for (int i = 0; i < kTensors; ++i) {
      if (i >= 3 && arguments[i] == Py_None) continue;
      if (!describe_dense(arguments[i], described[i])) Py_RETURN_FALSE;
      operands[i] = &described[i];
    }
    const long threads = PyLong_AsLong(arguments[kTensors]);
    if (threads == -1 && PyErr_Occurred()) return nullptr;
    if (!body(operands, static_cast<int>(threads))) Py_RETURN_FALSE;
    mark_changed(arguments[0]);
    Py_RETURN_TRUE;
  });
}

// expert_product(out, x, weight, bias, chosen, threads) -> bool
//
// out[p] = weight[chosen[p]] @ x[row of p] + bias[chosen[p]]. It does nothing and returns False
// unless read_experts().
PyObject* expert_product(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call_experts<5>(arguments, count, [](const dlpack::Tensor* const* given, int threads) {
    ExpertProduct product{};
    if (given[4] == nullptr ||
        !read_experts({given[0], given[1], given[2], given[3], given[4]}, product)) {
      return false;
    }
    const NoGil no_gil;
    pipekernels::expert_product(product, threads);
    return true;
  });
}

// integer_product(out, x, values, scales, zeros, bias, chosen, threads[, isa]) -> bool
//
// The same of integers, or of one matrix of them if `chosen` is None; unless read_integers(). `isa`
// is one of INTEGER_ISAS in place of the fastest.
PyObject* integer_product(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  IntegerIsa isa = best_integer_isa();
  if (count == 9) {
    isa = static_cast<IntegerIsa>(PyLong_AsLong(arguments[--count]));
    if (PyErr_Occurred()) return nullptr;
  }
  return call_experts<7>(arguments, count, [&](const dlpack::Tensor* const* given, int threads) {
    IntegerCall call{};
    if (given[3] == nullptr ||
        !read_integers({given[0], given[1], given[2], given[3], given[4], given[5], given[6]},
                       call)) {
      return false;
    }
    const NoGil no_gil;
    call.run(threads, isa);
    return true;
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
  py::list isas;
  for (const IntegerIsa isa : kIntegerIsas) {
    if (integer_isa_available(isa)) isas.append(static_cast<int>(isa));
  }
  m.attr("INTEGER_ISAS") = py::tuple(isas);
  define<&skinny_gemm>(m, "skinny_gemm");
  define<&skinny_gemm_partial>(m, "skinny_gemm_partial");
  define<&expert_product>(m, "expert_product");
  define<&integer_product>(m, "integer_product");
}

}  // namespace pipekernels::python
