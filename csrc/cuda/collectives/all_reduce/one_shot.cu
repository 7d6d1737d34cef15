#include "collectives/device_team.cuh"
#include "kernels.h"
#include "pipekernels/collectives/all_reduce/one_shot.cuh"

namespace pipekernels {
namespace {

template <Order order, class Type>
__global__ void __launch_bounds__(kDeviceThreads, 1)
    one_shot_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  one_shot_block<order, Type>(team, launch);
}

}  // namespace

const void* one_shot_kernel_for(DType dtype, Order kernel_order) {
  const void* kernel = nullptr;
  with_element_and_order(dtype, kernel_order, [&](auto element, auto order) {
    kernel = reinterpret_cast<const void*>(one_shot_kernel<order, decltype(element)>);
  });
  return kernel;
}

}  // namespace pipekernels
