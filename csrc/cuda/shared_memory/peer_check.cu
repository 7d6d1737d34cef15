#include "collectives/device_team.cuh"
#include "pipekernels/shared_memory/peer_check_block.cuh"

namespace pipekernels {
namespace {

__global__ void __launch_bounds__(kDeviceThreads, 1)
    write_to_peers_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  write_to_peers_block(team, launch);
}

__global__ void __launch_bounds__(kDeviceThreads, 1)
    compare_with_peers_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  compare_with_peers_block(team, launch);
}

}  // namespace

PeerCheck peer_check() {
  return {reinterpret_cast<const void*>(write_to_peers_kernel),
          reinterpret_cast<const void*>(compare_with_peers_kernel)};
}

}  // namespace pipekernels
