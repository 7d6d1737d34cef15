// The Python module pipekernels._C. Only the files of this folder use Python.
//
// Functions that must be fast to call take tensors, the others integer addresses and sizes. Invalid
// arguments raise ValueError or TypeError; std::invalid_argument becomes ValueError. Functions that
// copy or wait release the GIL; small all-reduces release it only when they have to wait.

#include <pybind11/pybind11.h>

#include "bindings.h"
#include "tensor.h"

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

py::dict build_info() {
  py::dict info;
  info["version"] = PIPEKERNELS_VERSION;
  info["compiler"] = PIPEKERNELS_COMPILER;
  info["cuda"] = kWithCuda;
  info["cuda_version"] = kCudaVersion;
  info["cuda_architectures"] = kCudaArchitectures;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  m.def("use_tensors", &use_tensors);
  m.def("check_memory", &check_memory);
  m.def("mark_changed", [](py::handle tensor) {
    require_tensor(tensor);
    mark_changed(tensor);
  });
  bind_micro_batches(m);
  bind_products(m);
  bind_collectives(m);
  bind_operators(m);
#ifdef PIPEKERNELS_WITH_CUDA
  bind_cuda_collectives(m);
  bind_p2p_copy(m);
#endif
}
