// Python bindings of collectives on CUDA.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "capsule.h"
#include "gil.h"
#include "pipekernels/collectives/all_gather.h"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/collectives/broadcast.h"
#include "pipekernels/collectives/cuda_communicator.h"
#include "pipekernels/collectives/reduce_scatter.h"
#include "pipekernels/host/nvlink.h"

namespace pipekernels::python {
namespace {

namespace py = pybind11;

}  // namespace

void bind_cuda_collectives(py::module_& m) {
  using WithoutGil = py::call_guard<NoGil>;

  m.def("has_nvlink", py::overload_cast<int, int>(&has_nvlink));

  py::class_<CudaCommunicator>(m, "CudaCommunicator")
      .def(py::init([](Communicator& core, int device, size_t symmetric_bytes, int blocks,
                       CudaCommunicator* parent) {
             if (symmetric_bytes > kMaxBytes) {
               throw std::invalid_argument("symmetric_bytes must be at most " +
                                           std::to_string(kMaxBytes) + ", got " +
                                           std::to_string(symmetric_bytes));
             }
             check_in_range("blocks", blocks, 1, kMaxDeviceBlocks);
             const NoGil no_gil;  // Not a call_guard: pybind11 registers the object in the call.
             return std::make_unique<CudaCommunicator>(core, device, symmetric_bytes, blocks,
                                                       parent);
           }),
           py::arg("core"), py::arg("device"), py::arg("symmetric_bytes"),
           py::arg("blocks") = kMaxDeviceBlocks, py::arg("parent") = nullptr,
           py::keep_alive<1, 2>())
      .def("allocate",
           [](CudaCommunicator& communicator, std::vector<int64_t> sizes, int dtype,
              uintptr_t stream) -> py::object {
             const DType type = dtype_of_code(dtype);
             const size_t bytes = bytes_of(sizes, type);
             std::unique_ptr<CudaBuffer> buffer;
             {
               const NoGil no_gil;
               buffer = communicator.allocate(bytes, address(stream));
             }
             if (!buffer) return py::none();
             return to_capsule(std::move(buffer), type, std::move(sizes), dlpack::kCuda,
                               communicator.device());
           })
      .def(
          "all_reduce",
          [](CudaCommunicator& communicator, uintptr_t data, size_t count, int dtype, int reduction,
             int algorithm, uint32_t shape, uintptr_t stream, bool may_meet) {
            const DType type = dtype_of_code(dtype);
            all_reduce_cuda(communicator, address_of("data", data, count, type), count, type,
                            reduction_of_code(reduction), algorithm_of_code(algorithm),
                            checked_shape(shape), {address(stream), may_meet});
          },
          WithoutGil())
      .def(
          "reduce_scatter",
          [](CudaCommunicator& communicator, uintptr_t input, uintptr_t output, size_t count,
             int dtype, int reduction, uint32_t shape, uintptr_t stream, bool may_meet) {
            const DType type = dtype_of_code(dtype);
            const int parts = communicator.world_size();
            reduce_scatter_cuda(communicator, address_of("input", input, count, type, parts),
                                address_of("output", output, count, type), count, type,
                                reduction_of_code(reduction), checked_shape(shape),
                                {address(stream), may_meet});
          },
          WithoutGil())
      .def(
          "all_gather",
          [](CudaCommunicator& communicator, uintptr_t input, uintptr_t output, size_t count,
             int dtype, uint32_t shape, uintptr_t stream, bool may_meet) {
            const DType type = dtype_of_code(dtype);
            const int parts = communicator.world_size();
            all_gather_cuda(communicator, address_of("input", input, count, type),
                            address_of("output", output, count, type, parts), count, type,
                            checked_shape(shape), {address(stream), may_meet});
          },
          WithoutGil())
      .def(
          "broadcast",
          [](CudaCommunicator& communicator, uintptr_t data, size_t count, int dtype, int root,
             uint32_t shape, uintptr_t stream, bool may_meet) {
            const DType type = dtype_of_code(dtype);
            broadcast_cuda(communicator, address_of("data", data, count, type), count, type, root,
                           checked_shape(shape), {address(stream), may_meet});
          },
          WithoutGil())
      .def_property_readonly("broken_links", &CudaCommunicator::broken_links)
      .def_property_readonly("has_slow_links", &CudaCommunicator::has_slow_links)
      .def("check", &CudaCommunicator::check, WithoutGil())
      .def("set_wide_loads", &CudaCommunicator::set_wide_loads)
      .def("synchronize", &CudaCommunicator::synchronize, WithoutGil())
      .def("close", &CudaCommunicator::close, py::arg("abort"), WithoutGil());
}

}  // namespace pipekernels::python
