#include "device_team.cuh"
#include "pipekernels/collectives/all_gather.h"
#include "pipekernels/collectives/all_gather_block.cuh"

namespace pipekernels {
namespace {

__global__ void __launch_bounds__(kDeviceThreads, 1)
    all_gather_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  all_gather_block(team, launch);
}

const void* const kKernel = reinterpret_cast<const void*>(all_gather_kernel);

}  // namespace

void add_all_gather_kernels(KernelList& kernels) { kernels.push_back(kKernel); }

void all_gather_cuda(CudaCommunicator& communicator, const void* input, void* output, size_t count,
                     DType dtype, uint32_t shape, const CudaCaller& caller) {
  const Call call{Operation::kAllGather, dtype, {}, {}, 0, shape, count};
  const uint64_t location = communicator.location_of(input, count * size_of(dtype), caller.stream);
  communicator.launch(kKernel, plan_all_gather(communicator.ranks(), call, input, output, location),
                      caller);
}

}  // namespace pipekernels
