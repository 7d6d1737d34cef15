#include "device_team.cuh"
#include "pipekernels/collectives/broadcast.h"
#include "pipekernels/collectives/broadcast_block.cuh"

namespace pipekernels {
namespace {

__global__ void __launch_bounds__(kDeviceThreads, 1)
    broadcast_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  broadcast_block(team, launch);
}

const void* const kKernel = reinterpret_cast<const void*>(broadcast_kernel);

}  // namespace

void add_broadcast_kernels(KernelList& kernels) { kernels.push_back(kKernel); }

void broadcast_cuda(CudaCommunicator& communicator, void* data, size_t count, DType dtype, int root,
                    uint32_t shape, const CudaCaller& caller) {
  check_root(root, communicator.world_size());
  const size_t bytes = count * size_of(dtype);
  const Algorithm algorithm = choose_broadcast(bytes, communicator.world_size());
  const auto from = static_cast<uint32_t>(root);
  const Call call{Operation::kBroadcast, dtype, {}, algorithm, from, shape, count};
  const uint64_t location = communicator.location_of(data, bytes, caller.stream);
  communicator.launch(kKernel, plan_broadcast(communicator.ranks(), call, data, location), caller);
}

}  // namespace pipekernels
