// The parts of the Python module; each is defined in its own file.
#pragma once

#include <pybind11/pybind11.h>

namespace pipekernels::python {

void bind_micro_batches(pybind11::module_& m);
void bind_products(pybind11::module_& m);
void bind_collectives(pybind11::module_& m);
// Only in a build with CUDA.
void bind_cuda_collectives(pybind11::module_& m);
void bind_p2p_copy(pybind11::module_& m);

}  // namespace pipekernels::python
