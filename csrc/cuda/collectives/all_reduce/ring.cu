#include "collectives/device_team.cuh"
#include "kernels.h"
#include "pipekernels/collectives/all_reduce/ring.cuh"

namespace pipekernels {
namespace {

template <class Type>
__global__ void __launch_bounds__(kDeviceThreads, 1)
    ring_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  ring_block<Type>(team, launch);
}

}  // namespace

const void* ring_kernel_for(DType dtype) {
  const void* kernel = nullptr;
  with_element(dtype, [&](auto element) {
    kernel = reinterpret_cast<const void*>(ring_kernel<decltype(element)>);
  });
  return kernel;
}

}  // namespace pipekernels
