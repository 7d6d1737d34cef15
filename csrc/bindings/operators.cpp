// Kernels of torch's operators, by which layers and compiled programs call products: one call for a
// product, its bias or its all-reduce.
//
// They take products of a few rows of CPU tensors. For all else they call the operator's kernel in
// Python, which computes the same.

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings.h"
#include "gil.h"
#include "pipekernels/collectives/all_reduce.h"
#include "products.h"
#include "tensor.h"
#include "torch_shim.h"

namespace pipekernels::python {
namespace {

using torch_shim::Value;

PyObject* python_kernels = nullptr;  // A dict from names to functions; never released.

void require(int32_t failed) {
  if (failed) throw std::runtime_error("torch could not describe or make a tensor");
}

using Tensor = torch_shim::OwnedTensor;

Tensor tensor_of(Value value) { return Tensor(reinterpret_cast<torch_shim::Tensor>(value)); }

Tensor optional_tensor_of(Value value) {
  const std::unique_ptr<Value> owned(reinterpret_cast<Value*>(value));
  return owned == nullptr ? nullptr : tensor_of(*owned);
}

// A weight of integers has a scale, and perhaps zeros: IntegerOperands.
struct Operands {
  Tensor x, weight, scale, zero, bias;
  int64_t columns;
};

constexpr int32_t kCpu = 0;  // A c10::DeviceType.

// Whether a matrix is not contiguous, but its transpose is.
bool is_transposed(const dlpack::Tensor& tensor) {
  return tensor.dims == 2 && dlpack::dense_elements(tensor) < 0 && tensor.strides[0] == 1 &&
         tensor.strides[1] == tensor.shape[0];
}

// Describes a contiguous or transposed tensor with memory, of a type that has a description; false
// for others.
bool describe(const Tensor& tensor, dlpack::Tensor& described, int32_t& dtype) {
  int64_t dims;
  const void* data;
  require(torch_shim::aoti_torch_get_dim(tensor.get(), &dims));
  require(torch_shim::aoti_torch_get_dtype(tensor.get(), &dtype));
  const auto* const type = torch_shim::type_of(dtype);
  if (type == nullptr) return false;
  described = {nullptr, dlpack::kCpu, 0, static_cast<int32_t>(dims), type->code, type->bits, 1,
               nullptr, nullptr,      0};
  require(torch_shim::aoti_torch_get_sizes(tensor.get(), &described.shape));
  require(torch_shim::aoti_torch_get_strides(tensor.get(), &described.strides));
  if (dlpack::dense_elements(described) < 1 && !is_transposed(described)) return false;
  if (torch_shim::torch_get_const_data_ptr(tensor.get(), &data) != 0 || is_low(data)) return false;
  described.data = const_cast<void*>(data);
  return true;
}

// A new contiguous tensor of the sizes of `x` but for its last one, which `out` describes.
Tensor result_like(const dlpack::Tensor& x, int32_t dtype, int64_t columns, dlpack::Tensor& out) {
  Integers sizes(x.shape, x.shape + x.dims), strides(x.dims, 1);
  sizes.back() = columns;
  for (int32_t d = x.dims - 1; d > 0; --d) strides[d - 1] = strides[d] * sizes[d];
  torch_shim::Tensor made;
  require(torch_shim::aoti_torch_empty_strided(x.dims, sizes.data(), strides.data(), dtype, kCpu, 0,
                                               &made));
  Tensor result(made);
  return describe(result, out, dtype) ? std::move(result) : nullptr;
}

// x @ weight.T plus `bias` in a new tensor that `out` describes; null for what the kernels do not
// take. Of integers they take any number of rows, unless only `few` are asked for.
Tensor product(const Operands& operands, bool few, dlpack::Tensor& out) {
  dlpack::Tensor x, weight, scale, zero, bias;
  int32_t dtype, other;
  const auto absent = [&](const Tensor& tensor, dlpack::Tensor& described) {
    return tensor && !describe(tensor, described, other);
  };
  if (!describe(operands.x, x, dtype) || absent(operands.weight, weight) ||
      absent(operands.scale, scale) || absent(operands.zero, zero) || absent(operands.bias, bias) ||
      x.dims < 1 || is_transposed(x)) {
    return nullptr;
  }
  uint32_t threads;
  require(torch_shim::torch_get_num_threads(&threads));
  const auto* const added = operands.bias ? &bias : nullptr;
  if (operands.scale) {
    Tensor result = result_like(x, dtype, operands.columns, out);
    IntegerCall call{};
    const auto* const zeros = operands.zero ? &zero : nullptr;
    if (!result || !read_integers({&out, &x, &weight, &scale, zeros, added, nullptr}, call) ||
        (few && call.product.rows > kMaxSkinnyRows)) {
      return nullptr;
    }
    call.run(static_cast<int>(threads));
    return result;
  }
  if (weight.dims != 2 || dlpack::dense_elements(x) > kMaxSkinnyRows * weight.shape[1]) {
    return nullptr;
  }
  Tensor result = result_like(x, dtype, weight.shape[0], out);
  SkinnyGemm dense{};
  if (!result || !read_product(out, x, weight, false, dense)) return nullptr;
  if (operands.bias && !read_bias(bias, dense)) return nullptr;
  dense.transposed = is_transposed(weight);
  skinny_gemm(dense, static_cast<int>(threads));
  return result;
}

// The result of the kernel in Python, which takes and gives capsules of references.
template <class... Arguments>
Tensor by_python(const char* name, Operands& operands, const Arguments&... others) {
  const py::gil_scoped_acquire gil;
  const auto capsule = [](Tensor& each) { return py::cast(static_cast<void*>(each.release())); };
  const py::object kernel = py::reinterpret_borrow<py::dict>(python_kernels)[name];
  const py::object result = kernel(capsule(operands.x), capsule(operands.weight),
                                   capsule(operands.scale), capsule(operands.zero), others...);
  return Tensor(static_cast<torch_shim::Tensor>(result.cast<void*>()));
}

// Calls `body` without the GIL, with C++ exceptions as Python's, which torch hands to the caller.
template <class Body>
Value guarded(const Body& body) {
  std::optional<NoGil> no_gil;  // Torch has released it, unless C++ calls the operator.
  if (PyGILState_Check()) no_gil.emplace();
  try {
    return reinterpret_cast<Value>(body().release());
  } catch (const py::error_already_set&) {
    throw;
  } catch (...) {
    const py::gil_scoped_acquire gil;
    set_python_error();
    throw py::error_already_set();
  }
}

// linear(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, int columns) -> Tensor
void linear(Value* values, uint64_t, uint64_t) {
  Operands operands{tensor_of(values[0]),          tensor_of(values[1]),
                    optional_tensor_of(values[2]), optional_tensor_of(values[3]),
                    optional_tensor_of(values[4]), static_cast<int64_t>(values[5])};
  values[0] = guarded([&] {
    dlpack::Tensor out;
    Tensor result = product(operands, false, out);
    return result ? std::move(result)
                  : by_python("linear", operands, static_cast<void*>(operands.bias.release()),
                              operands.columns);
  });
}

// The communicator, if it makes all-reduces for this process without Python: one over hosts does
// not, and of ranks that are threads Python says which calls are missing.
std::shared_ptr<Communicator> native_communicator(int64_t handle) {
  const py::gil_scoped_acquire gil;
  auto communicator = communicator_of(handle);
  const bool is_native =
      communicator != nullptr && (communicator->world_size() == 1 || !communicator->is_threads());
  return is_native ? communicator : nullptr;
}

// row_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, int columns, int comm,
//            bool scatter) -> Tensor
void row_linear(Value* values, uint64_t, uint64_t) {
  Operands operands{tensor_of(values[0]),
                    tensor_of(values[1]),
                    optional_tensor_of(values[2]),
                    optional_tensor_of(values[3]),
                    nullptr,
                    static_cast<int64_t>(values[4])};
  const auto handle = static_cast<int64_t>(values[5]);
  const bool scatter = values[6] & 1;
  values[0] = guarded([&] {
    dlpack::Tensor out;
    const auto communicator = scatter ? nullptr : native_communicator(handle);
    Tensor result = communicator ? product(operands, true, out) : nullptr;
    if (!result) return by_python("row_linear", operands, operands.columns, handle, scatter);
    uint32_t shape;
    {
      const py::gil_scoped_acquire gil;
      shape = shape_digest(py::tuple(py::cast(Integers(out.shape, out.shape + out.dims))));
    }
    all_reduce(*communicator, out.data, static_cast<size_t>(dlpack::dense_elements(out)),
               static_cast<DType>(dtype_of(out)), Reduction::kSum, Algorithm::kAuto, shape);
    return result;
  });
}

// Registers the kernels, once, for CPU tensors; does nothing if torch is too old.
void register_operators(const py::dict& kernels_in_python) {
  void* library;
  if (python_kernels != nullptr || !torch_shim::find_functions()) return;
  python_kernels = Py_NewRef(kernels_in_python.ptr());
  require(
      torch_shim::aoti_torch_library_init_impl("pipekernels", "CPU", __FILE__, __LINE__, &library));
  require(torch_shim::torch_library_impl(library, "linear", &linear, torch_shim::kVersion));
  require(torch_shim::torch_library_impl(library, "row_linear", &row_linear, torch_shim::kVersion));
}

}  // namespace

void bind_operators(py::module_& m) { m.def("register_operators", &register_operators); }

}  // namespace pipekernels::python
