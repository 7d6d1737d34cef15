// Python module pipekernels._C: the only file that knows pybind11.
//
// Tensors arrive as integer addresses, sizes, strides and item sizes; std::invalid_argument becomes
// ValueError. Everything that copies or waits runs without the GIL.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "pipekernels/all_gather.h"
#include "pipekernels/all_reduce.h"
#include "pipekernels/broadcast.h"
#include "pipekernels/communicator.h"
#include "pipekernels/cuda_communicator.h"
#include "pipekernels/micro_batch.h"
#include "pipekernels/reduce_scatter.h"

namespace py = pybind11;

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

// ---- build information
// ---------------------------------------------------------------------------

py::dict build_info() {
  py::dict info;
  info["version"] = PIPEKERNELS_VERSION;
  info["compiler"] = PIPEKERNELS_COMPILER;
  info["cuda"] = kWithCuda;
  info["cuda_version"] = kCudaVersion;
  info["cuda_architectures"] = kCudaArchitectures;
  return info;
}

// ---- micro-batches
// -------------------------------------------------------------------------------

using Integers = std::vector<int64_t>;

using Whole =
    std::tuple<uintptr_t, int64_t, Integers, Integers>;  // address, item size, shape, strides
using Part = std::pair<uintptr_t, Integers>;             // address, strides

pipekernels::MicroBatchCopy micro_batch_copy(bool split, int64_t dim, Integers sizes,
                                             const std::vector<Whole>& wholes,
                                             const std::vector<Part>& micro_batches) {
  pipekernels::MicroBatchCopy request;
  request.direction = split ? pipekernels::Direction::kSplit : pipekernels::Direction::kConcat;
  request.dim = dim;
  request.sizes = std::move(sizes);
  for (const auto& [address, item_size, shape, strides] : wholes) {
    request.wholes.push_back({reinterpret_cast<char*>(address), item_size, shape, strides});
  }
  for (const auto& [address, strides] : micro_batches) {
    request.micro_batches.push_back({reinterpret_cast<char*>(address), strides});
  }
  return request;
}

void bind_micro_batches(py::module_& m) {
  m.def(
      "copy_micro_batches",
      [](bool split, int64_t dim, Integers sizes, const std::vector<Whole>& wholes,
         const std::vector<Part>& micro_batches, int threads) {
        const auto request = micro_batch_copy(split, dim, std::move(sizes), wholes, micro_batches);
        pipekernels::copy_micro_batches(request, threads);
      },
      py::arg("split"), py::arg("dim"), py::arg("sizes"), py::arg("wholes"),
      py::arg("micro_batches"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());
#ifdef PIPEKERNELS_WITH_CUDA
  m.def(
      "copy_micro_batches_cuda",
      [](bool split, int64_t dim, Integers sizes, const std::vector<Whole>& wholes,
         const std::vector<Part>& micro_batches, uintptr_t stream) {
        const auto request = micro_batch_copy(split, dim, std::move(sizes), wholes, micro_batches);
        pipekernels::copy_micro_batches_cuda(request, reinterpret_cast<void*>(stream));
      },
      py::arg("split"), py::arg("dim"), py::arg("sizes"), py::arg("wholes"),
      py::arg("micro_batches"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
#endif
}

// ---- collectives
// ---------------------------------------------------------------------------------

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

// Lets Ctrl-C end a wait. Python handles signals in the main thread alone.
void check_signals() {
  if (gettid() != getpid()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void* address(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

void bind_collectives(py::module_& m) {
  using namespace pipekernels;
  using NoGil = py::call_guard<py::gil_scoped_release>;

  m.def("set_peer_error", [](const py::object& cls) {
    Py_XDECREF(peer_error_class);
    peer_error_class = cls.inc_ref().ptr();
  });
  py::register_local_exception_translator(&translate_error);

  py::class_<SymmetricBuffer>(m, "SymmetricBuffer", py::buffer_protocol())
      .def_buffer([](SymmetricBuffer& buffer) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(buffer.data()), buffer.bytes());
      });

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def_static("create", &Segment::create, py::arg("world_size"), py::arg("one_shot_bytes") = 0)
      .def(py::init(&Segment::map), py::arg("fd"), py::arg("world_size"), NoGil());

  py::class_<Communicator>(m, "Communicator")
      .def(py::init([](std::shared_ptr<Segment> segment, int rank, std::vector<int> pidfds,
                       double timeout) {
             return std::make_unique<Communicator>(std::move(segment), rank, std::move(pidfds),
                                                   Seconds(timeout), &check_signals);
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
          py::arg("algorithm"), py::arg("shape") = 0, NoGil())
      .def(
          "reduce_scatter",
          [](Communicator& communicator, uintptr_t input, uintptr_t output, size_t count, int dtype,
             int reduction, uint32_t shape) {
            reduce_scatter(communicator, address(input), address(output), count,
                           static_cast<DType>(dtype), static_cast<Reduction>(reduction), shape);
          },
          py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("reduction"), py::arg("shape") = 0, NoGil())
      .def(
          "all_gather",
          [](Communicator& communicator, uintptr_t input, uintptr_t output, size_t count, int dtype,
             uint32_t shape) {
            all_gather(communicator, address(input), address(output), count,
                       static_cast<DType>(dtype), shape);
          },
          py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("shape") = 0, NoGil())
      .def(
          "broadcast",
          [](Communicator& communicator, uintptr_t data, size_t count, int dtype, int root,
             uint32_t shape) {
            broadcast(communicator, address(data), count, static_cast<DType>(dtype), root, shape);
          },
          py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("root"),
          py::arg("shape") = 0, NoGil())
      .def("barrier", &barrier, NoGil())
      .def("close", &Communicator::close, NoGil())
      .def("abort", &Communicator::abort, NoGil());
}

#ifdef PIPEKERNELS_WITH_CUDA
// The binary interface of DLPack, by which torch takes memory with its owner.
namespace dlpack {

struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // Null: contiguous.
  uint64_t offset;
};
constexpr int32_t kCuda = 2;
constexpr uint8_t kUnsigned = 1;

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*release)(ManagedTensor*);
};

static_assert(offsetof(Tensor, shape) == 24 && sizeof(ManagedTensor) == 64);

}  // namespace dlpack

// A capsule with a tensor of bytes, which owns `buffer`.
py::object to_dlpack(std::unique_ptr<pipekernels::CudaBuffer> buffer, int device) {
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
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<CudaCommunicator>(m, "CudaCommunicator")
      .def(py::init<Communicator&, int, size_t>(), py::arg("core"), py::arg("device"),
           py::arg("symmetric_bytes"), py::keep_alive<1, 2>(), NoGil())
      .def("allocate",
           [](CudaCommunicator& communicator, size_t bytes, uintptr_t stream) -> py::object {
             std::unique_ptr<CudaBuffer> buffer;
             {
               const py::gil_scoped_release no_gil;
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
          NoGil())
      .def(
          "all_reduce_when_ready",
          [](CudaCommunicator& communicator, uintptr_t data, size_t count, int dtype, int reduction,
             uintptr_t ready, int32_t target, size_t block_elements, int blocks, uint32_t shape,
             uintptr_t stream, bool may_meet) {
            const Gates gates{static_cast<const int32_t*>(address(ready)), target, block_elements};
            all_reduce_when_ready_cuda(communicator, address(data), count,
                                       static_cast<DType>(dtype), static_cast<Reduction>(reduction),
                                       gates, blocks, shape, {address(stream), may_meet});
          },
          NoGil())
      .def(
          "reduce_scatter",
          [](CudaCommunicator& communicator, uintptr_t input, uintptr_t output, size_t count,
             int dtype, int reduction, uint32_t shape, uintptr_t stream, bool may_meet) {
            reduce_scatter_cuda(communicator, address(input), address(output), count,
                                static_cast<DType>(dtype), static_cast<Reduction>(reduction), shape,
                                {address(stream), may_meet});
          },
          NoGil())
      .def(
          "all_gather",
          [](CudaCommunicator& communicator, uintptr_t input, uintptr_t output, size_t count,
             int dtype, uint32_t shape, uintptr_t stream, bool may_meet) {
            all_gather_cuda(communicator, address(input), address(output), count,
                            static_cast<DType>(dtype), shape, {address(stream), may_meet});
          },
          NoGil())
      .def(
          "broadcast",
          [](CudaCommunicator& communicator, uintptr_t data, size_t count, int dtype, int root,
             uint32_t shape, uintptr_t stream, bool may_meet) {
            broadcast_cuda(communicator, address(data), count, static_cast<DType>(dtype), root,
                           shape, {address(stream), may_meet});
          },
          NoGil())
      .def("check", &CudaCommunicator::check, NoGil())
      .def("synchronize", &CudaCommunicator::synchronize, NoGil())
      .def("close", &CudaCommunicator::close, py::arg("abort"), NoGil());
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  bind_micro_batches(m);
  bind_collectives(m);
#ifdef PIPEKERNELS_WITH_CUDA
  bind_cuda_collectives(m);
#endif
}
