// The parts of the Python module; each is defined in its own file.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "pipekernels/collectives/communicator.h"

namespace pipekernels::python {

using CommunicatorClass = pybind11::class_<Communicator, std::shared_ptr<Communicator>>;

// Copying as many bytes takes some 10 us: calls that copy more release the GIL at once.
constexpr size_t kFewBytes = 256 << 10;

// Sets the Python exception for the current C++ exception, as pybind11 does for its functions.
void set_python_error();

// The communicator that has been named so; null if it is closed or gone. Requires the GIL.
std::shared_ptr<Communicator> communicator_of(int64_t handle);

void bind_micro_batches(pybind11::module_& m);
void bind_products(pybind11::module_& m);
void bind_collectives(pybind11::module_& m);
void bind_messages(pybind11::module_& m, CommunicatorClass& communicator);
// Only in a build with CUDA.
void bind_cuda_collectives(pybind11::module_& m);
void bind_p2p_copy(pybind11::module_& m);
void bind_operators(pybind11::module_& m);

}  // namespace pipekernels::python
