// Links between CUDA devices, of which CUDA_VISIBLE_DEVICES may hide some from this process.
#pragma once

#include <cuda_runtime.h>

namespace pipekernels {

bool has_nvlink(const cudaUUID_t& a, const cudaUUID_t& b);

}  // namespace pipekernels
