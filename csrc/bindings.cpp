// Python module pipekernels._C. This file, bindings_tensor.h and bindings_gil.h alone know Python.
//
// Tensors arrive as they are where a call has to be short, else as integer addresses and sizes;
// std::invalid_argument becomes ValueError. What copies or waits runs without the GIL, but for sums
// of few bytes, which give it up when they have to wait.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_gil.h"
#include "bindings_tensor.h"
#include "pipekernels/all_gather.h"
#include "pipekernels/all_reduce.h"
#include "pipekernels/broadcast.h"
#include "pipekernels/communicator.h"
#include "pipekernels/cuda_communicator.h"
#include "pipekernels/dlpack.h"
#include "pipekernels/dlpack_tensor.h"
#include "pipekernels/micro_batch.h"
#include "pipekernels/process.h"
#include "pipekernels/reduce_scatter.h"

namespace py = pybind11;
using namespace pipekernels::python;

namespace {

#ifdef PIPEKERNELS_WITH_CUDA
constexpr bool kWithCuda = true;
constexpr const char* kCudaVersion = PIPEKERNELS_CUDA_VERSION;
constexpr const char* kCudaArchitectures = PIPEKERNELS_CUDA_ARCHITECTURES;
#else
constexpr bool kWithCuda = false;
constexpr const char* kCudaVersion = "";
constexpr const char* kCudaArchitectures = "";
#endif

// ---- build information ------------------------------------------------------------------------

py::dict build_info() {
  py::dict info;
  info["version"] = PIPEKERNELS_VERSION;
  info["compiler"] = PIPEKERNELS_COMPILER;
  info["cuda"] = kWithCuda;
  info["cuda_version"] = kCudaVersion;
  info["cuda_architectures"] = kCudaArchitectures;
  return info;
}

// ---- micro-batches ----------------------------------------------------------------------------

pipekernels::Cast cast(int from, int to) {
  if (from < 0 || to < 0) {
    throw std::invalid_argument(
        "a tensor and its micro-batches may differ in dtype if both are float64, float32, float16 "
        "or bfloat16, not otherwise");
  }
  return {static_cast<pipekernels::DType>(from), static_cast<pipekernels::DType>(to)};
}

// Where dtypes of a tensor and its micro-batches differ, elements are cast.
pipekernels::MicroBatchCopy micro_batch_copy(bool split, int64_t dim, const py::list& wholes,
                                             const py::list& micro_batches) {
  pipekernels::MicroBatchCopy request;
  request.direction = split ? pipekernels::Direction::kSplit : pipekernels::Direction::kConcat;
  request.dim = dim;
  std::vector<int> dtypes;  // of the whole tensors
  for (const py::handle tensor : wholes) {
    auto [data, item_size, dtype, shape, strides] = view_of(tensor);
    request.wholes.push_back({data, item_size, std::move(shape), std::move(strides)});
    dtypes.push_back(dtype);
  }
  if (request.wholes.empty()) throw std::invalid_argument("there are 0 tensors; give at least one");
  size_t t = 0;  // Which of the tensors of a micro-batch is next.
  for (const py::handle tensor : micro_batches) {
    auto [data, item_size, dtype, shape, strides] = view_of(tensor);
    if (t == 0) request.sizes.push_back(shape.at(dim));
    if (dtype != dtypes[t]) {
      request.wholes[t].cast = split ? cast(dtypes[t], dtype) : cast(dtype, dtypes[t]);
    }
    if (shape.at(dim) != request.sizes.back()) {
      throw std::invalid_argument("the tensors of micro-batch " +
                                  std::to_string(request.sizes.size() - 1) +
                                  " differ in their size along dimension " + std::to_string(dim));
    }
    request.micro_batches.push_back({data, std::move(strides)});
    if (++t == request.wholes.size()) t = 0;
  }
  return request;
}

// Whether an operation on its memory, on the CPU or a CUDA device, is one on its elements.
bool is_plain(py::handle tensor, const pipekernels::dlpack::Tensor& described) {
  using namespace pipekernels::dlpack;
  return (described.device_type == kCpu || described.device_type == kCuda) &&
         holds_elements(tensor, described);
}

bool are_plain(const py::list& tensors) {
  for (const py::handle tensor : tensors) {
    pipekernels::dlpack::Tensor described;
    if (!describe(tensor, described) || !is_plain(tensor, described)) return false;
  }
  return true;
}

// are_plain() of micro-batches of so many tensors each, and whether they can be concatenated along
// `dim`, on one device.
bool are_plain_and_fit(int64_t dim, size_t tensors, const py::list& micro_batches) {
  using pipekernels::dlpack::Tensor;
  std::vector<Tensor> wanted(tensors);
  int64_t size = 0;  // of this micro-batch, along `dim`
  size_t t = 0;      // Which of its tensors is next.
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    const py::handle tensor = micro_batches[i];
    Tensor given;
    if (!describe(tensor, given) || dim >= given.dims) return false;
    if (i < tensors) wanted[t] = given;
    if (given.device_type != wanted[0].device_type || given.device != wanted[0].device) {
      return false;
    }
    if (t == 0) size = given.shape[dim];
    if (given.shape[dim] != size || !alike_but_in(dim, wanted[t], given)) return false;
    if (!is_plain(tensor, given)) return false;
    if (++t == tensors) t = 0;
  }
  return true;
}

void bind_micro_batches(py::module_& m) {
  m.def("are_plain", &are_plain);
  m.def("are_plain_and_fit", &are_plain_and_fit);
  m.def(
      "copy_micro_batches",
      [](bool split, int64_t dim, const py::list& wholes, const py::list& micro_batches,
         int threads) {
        const auto request = micro_batch_copy(split, dim, wholes, micro_batches);
        const NoGil no_gil;
        pipekernels::copy_micro_batches(request, threads);
      },
      py::arg("split"), py::arg("dim"), py::arg("wholes"), py::arg("micro_batches"),
      py::arg("threads"));
#ifdef PIPEKERNELS_WITH_CUDA
  m.def(
      "copy_micro_batches_cuda",
      [](bool split, int64_t dim, const py::list& wholes, const py::list& micro_batches,
         uintptr_t stream) {
        const auto request = micro_batch_copy(split, dim, wholes, micro_batches);
        const NoGil no_gil;
        pipekernels::copy_micro_batches_cuda(request, reinterpret_cast<void*>(stream));
      },
      py::arg("split"), py::arg("dim"), py::arg("wholes"), py::arg("micro_batches"),
      py::arg("stream"));
#endif
}

// ---- collectives ------------------------------------------------------------------------------

// The class that Python raises for a PeerError: cls(message, rank).
PyObject* peer_error_class = nullptr;

void translate_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const pipekernels::PeerError& e) {
    const py::object instance =
        py::reinterpret_borrow<py::object>(peer_error_class)(e.what(), e.rank);
    PyErr_SetObject(peer_error_class, instance.ptr());
  } catch (const pipekernels::TimeoutError& e) {
    PyErr_SetString(PyExc_TimeoutError, e.what());
  }
}

// As pybind11 does it for the functions that it defines.
void set_python_error() {
  try {
    translate_error(std::current_exception());
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

// Lets Ctrl-C end a wait. Python handles signals in the main thread alone.
void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;  // glibc has gettid() from 2.30 on.
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void* address(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

// As digest_of() in comm/tensors.py.
uint32_t shape_digest(py::handle tensor, int32_t dims) {
  return dims == 1 ? 0 : static_cast<uint32_t>(py::hash(tensor.attr("shape")) & 0x3fffff);
}

// The code among `codes` that `name` is the very name of, the one string object that literals in
// Python share; -1 for all else.
template <class Code, int codes>
int code_of(const PyObject* name) {
  static const auto names = [] {
    std::array<PyObject*, codes> interned;
    for (int i = 0; i < codes; ++i) {
      interned[i] = PyUnicode_InternFromString(name_of(static_cast<Code>(i)));
    }
    return interned;
  }();
  int code = codes - 1;
  while (code >= 0 && name != names[code]) --code;
  return code;
}

// all_reduce_tensor(tensor, op, algorithm) -> bool, of the Communicator `self`. Does nothing and
// returns False for names that no literal has, and for a tensor that has to be made ready first:
// one that is not dense, lies on another device, has no memory, or that torch does not describe to
// C. Called without pybind11, whose way takes as long as a small sum.
PyObject* all_reduce_tensor(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  using namespace pipekernels;
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "expected (tensor, op, algorithm)");
    return nullptr;
  }
  try {
    const py::handle tensor = arguments[0];
    dlpack::Tensor described;
    if (!describe(tensor, described) || described.device_type != dlpack::kCpu) Py_RETURN_FALSE;
    const int dtype = dtype_of(described);
    const int64_t elements = dense_elements(described);
    if (dtype < 0 || elements < 0 || !holds_elements(tensor, described)) Py_RETURN_FALSE;
    const int reduction = code_of<Reduction, kReductions>(arguments[1]);
    const int algorithm = code_of<Algorithm, kAlgorithms>(arguments[2]);
    if (reduction < 0 || algorithm < 0) Py_RETURN_FALSE;
    const uint32_t shape = shape_digest(tensor, described.dims);
    auto& communicator = py::handle(self).cast<Communicator&>();
    {
      const GilUntilRelease gil;
      // The peers may be threads that want it; the copies of so many bytes take some 10 us.
      constexpr int64_t kFewBytes = 256 << 10;
      if (communicator.is_threads() || elements * described.type_bits / 8 > kFewBytes) {
        GilUntilRelease::release();
      }
      all_reduce(communicator, static_cast<std::byte*>(described.data) + described.offset,
                 static_cast<size_t>(elements), static_cast<DType>(dtype),
                 static_cast<Reduction>(reduction), static_cast<Algorithm>(algorithm), shape);
    }
    mark_changed(tensor);
    Py_RETURN_TRUE;
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

void bind_collectives(py::module_& m) {
  using namespace pipekernels;
  using WithoutGil = py::call_guard<NoGil>;

  m.def("set_peer_error", [](const py::object& cls) {
    Py_XDECREF(peer_error_class);
    peer_error_class = cls.inc_ref().ptr();
  });
  py::register_local_exception_translator(&translate_error);

  m.def("open_pidfd", &open_pidfd);

  py::class_<SymmetricBuffer>(m, "SymmetricBuffer", py::buffer_protocol())
      .def_buffer([](SymmetricBuffer& buffer) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(buffer.data()), buffer.bytes());
      });

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def_static("create", &Segment::create, py::arg("world_size"), py::arg("one_shot_bytes") = 0)
      .def(py::init(&Segment::map), py::arg("fd"), py::arg("world_size"), WithoutGil());

  py::class_<Communicator>(m, "Communicator")
      .def(py::init([](std::shared_ptr<Segment> segment, int rank, std::vector<int> pidfds,
                       double timeout) {
             return std::make_unique<Communicator>(std::move(segment), rank, std::move(pidfds),
                                                   Seconds(timeout), &check_signals,
                                                   &GilUntilRelease::release);
           }),
           py::arg("segment"), py::arg("rank"), py::arg("pidfds"), py::arg("timeout"))
      .def_property_readonly("one_shot_bytes", &Communicator::one_shot_bytes)
      .def("allocate",
           [](const Communicator& communicator, size_t bytes) {
             return std::make_unique<SymmetricBuffer>(communicator.heap(), bytes);
           })
      .def(
          "all_reduce",
          [](Communicator& communicator, uintptr_t data, size_t count, int dtype, int reduction,
             int algorithm, uint32_t shape) {
            all_reduce(communicator, address(data), count, static_cast<DType>(dtype),
                       static_cast<Reduction>(reduction), static_cast<Algorithm>(algorithm), shape);
          },
          py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("reduction"),
          py::arg("algorithm"), py::arg("shape") = 0, WithoutGil())
      .def_property_readonly(
          "all_reduce_tensor",
          [](const py::object& self) {
            // Not of the property's name: torch.compile would take that for what makes methods.
            static PyMethodDef method{
                "Communicator.all_reduce_tensor",
                reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&all_reduce_tensor)),
                METH_FASTCALL, nullptr};
            return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
          })
      .def(
          "reduce_scatter",
          [](Communicator& communicator, uintptr_t input, uintptr_t output, size_t count, int dtype,
             int reduction, uint32_t shape) {
            reduce_scatter(communicator, address(input), address(output), count,
                           static_cast<DType>(dtype), static_cast<Reduction>(reduction), shape);
          },
          py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("reduction"), py::arg("shape") = 0, WithoutGil())
      .def(
          "all_gather",
          [](Communicator& communicator, uintptr_t input, uintptr_t output, size_t count, int dtype,
             uint32_t shape) {
            all_gather(communicator, address(input), address(output), count,
                       static_cast<DType>(dtype), shape);
          },
          py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("shape") = 0, WithoutGil())
      .def(
          "broadcast",
          [](Communicator& communicator, uintptr_t data, size_t count, int dtype, int root,
             uint32_t shape) {
            broadcast(communicator, address(data), count, static_cast<DType>(dtype), root, shape);
          },
          py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("root"),
          py::arg("shape") = 0, WithoutGil())
      .def("barrier", &barrier, WithoutGil())
      .def("close", &Communicator::close, WithoutGil())
      .def("abort", &Communicator::abort, WithoutGil());
}

#ifdef PIPEKERNELS_WITH_CUDA
// A capsule with a tensor of bytes, which owns `buffer`.
py::object to_dlpack(std::unique_ptr<pipekernels::CudaBuffer> buffer, int device) {
  namespace dlpack = pipekernels::dlpack;
  struct Owned : dlpack::ManagedTensor {
    std::unique_ptr<pipekernels::CudaBuffer> buffer;
    int64_t size;
  };
  auto* owned = new Owned;
  owned->size = static_cast<int64_t>(buffer->bytes());
  owned->tensor = {buffer->data(), dlpack::kCuda, device, 1, dlpack::kUnsigned, 8, 1,
                   &owned->size,   nullptr,       0};
  owned->context = nullptr;
  owned->release = [](dlpack::ManagedTensor* self) { delete static_cast<Owned*>(self); };
  owned->buffer = std::move(buffer);
  // Who takes the tensor renames the capsule, and releases it.
  PyObject* capsule =
      PyCapsule_New(static_cast<dlpack::ManagedTensor*>(owned), "dltensor", [](PyObject* self) {
        if (!PyCapsule_IsValid(self, "dltensor")) return;
        auto* tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
        tensor->release(tensor);
      });
  if (capsule == nullptr) {
    delete owned;
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

void bind_cuda_collectives(py::module_& m) {
  using namespace pipekernels;
  using WithoutGil = py::call_guard<NoGil>;

  py::class_<CudaCommunicator>(m, "CudaCommunicator")
      .def(py::init<Communicator&, int, size_t>(), py::arg("core"), py::arg("device"),
           py::arg("symmetric_bytes"), py::keep_alive<1, 2>(), WithoutGil())
      .def("allocate",
           [](CudaCommunicator& communicator, size_t bytes, uintptr_t stream) -> py::object {
             std::unique_ptr<CudaBuffer> buffer;
             {
               const NoGil no_gil;
               buffer = communicator.allocate(bytes, address(stream));
             }
             if (!buffer) return py::none();
             return to_dlpack(std::move(buffer), communicator.device());
           })
      .def(
          "all_reduce",
          [](CudaCommunicator& communicator, uintptr_t data, size_t count, int dtype, int reduction,
             int algorithm, uint32_t shape, uintptr_t stream, bool may_meet) {
            all_reduce_cuda(communicator, address(data), count, static_cast<DType>(dtype),
                            static_cast<Reduction>(reduction), static_cast<Algorithm>(algorithm),
                            shape, {address(stream), may_meet});
          },
          WithoutGil())
      .def(
          "all_reduce_when_ready",
          [](CudaCommunicator& communicator, uintptr_t data, size_t count, int dtype, int reduction,
             const std::tuple<uintptr_t, int32_t, size_t>& gates, int blocks, uint32_t shape,
             uintptr_t stream, bool may_meet) {
            const auto [ready, target, block_elements] = gates;
            all_reduce_when_ready_cuda(
                communicator, address(data), count, static_cast<DType>(dtype),
                static_cast<Reduction>(reduction),
                {static_cast<const int32_t*>(address(ready)), target, block_elements}, blocks,
                shape, {address(stream), may_meet});
          },
          WithoutGil())
      .def(
          "reduce_scatter",
          [](CudaCommunicator& communicator, uintptr_t input, uintptr_t output, size_t count,
             int dtype, int reduction, uint32_t shape, uintptr_t stream, bool may_meet) {
            reduce_scatter_cuda(communicator, address(input), address(output), count,
                                static_cast<DType>(dtype), static_cast<Reduction>(reduction), shape,
                                {address(stream), may_meet});
          },
          WithoutGil())
      .def(
          "all_gather",
          [](CudaCommunicator& communicator, uintptr_t input, uintptr_t output, size_t count,
             int dtype, uint32_t shape, uintptr_t stream, bool may_meet) {
            all_gather_cuda(communicator, address(input), address(output), count,
                            static_cast<DType>(dtype), shape, {address(stream), may_meet});
          },
          WithoutGil())
      .def(
          "broadcast",
          [](CudaCommunicator& communicator, uintptr_t data, size_t count, int dtype, int root,
             uint32_t shape, uintptr_t stream, bool may_meet) {
            broadcast_cuda(communicator, address(data), count, static_cast<DType>(dtype), root,
                           shape, {address(stream), may_meet});
          },
          WithoutGil())
      .def("check", &CudaCommunicator::check, WithoutGil())
      .def("synchronize", &CudaCommunicator::synchronize, WithoutGil())
      .def("close", &CudaCommunicator::close, py::arg("abort"), WithoutGil());
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  m.def("use_tensors", &use_tensors);
  m.def("check_memory", &check_memory);
  m.def("mark_changed", &mark_changed);
  bind_micro_batches(m);
  bind_collectives(m);
#ifdef PIPEKERNELS_WITH_CUDA
  bind_cuda_collectives(m);
#endif
}
