// The host code of csrc/cuda on the fake CUDA runtime, once for all tests of it, and kernels whose
// blocks are CPU threads.
#include "cuda_rank.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "../device_team.h"
#include "collectives/communicator.cu"
#include "collectives/set_up.cu"
#include "pipekernels/collectives/all_gather_block.cuh"
#include "pipekernels/collectives/all_reduce/one_shot.cuh"
#include "pipekernels/collectives/all_reduce/ring.cuh"
#include "pipekernels/collectives/all_reduce/two_shot.cuh"
#include "pipekernels/collectives/all_reduce_launch.cuh"
#include "pipekernels/collectives/broadcast_block.cuh"
#include "pipekernels/collectives/reduce_scatter_block.cuh"
#include "pipekernels/shared_memory/peer_check_block.cuh"
#include "shared_memory/symmetric_heap.cu"

namespace pipekernels {

using Float = ElementOf<DType::kFloat32>;

constexpr int kThreadsOfBlock = 2;

static Kernel kernel_of(void (*body)(CpuTeam&, const DeviceLaunch&)) {
  return {sizeof(DeviceLaunch), [body](const std::byte* argument) {
            DeviceLaunch launch;
            std::memcpy(static_cast<void*>(&launch), argument, sizeof(launch));
            run_stream({{launch, body}}, launch.blocks, kThreadsOfBlock);
          }};
}

Kernel one_shot_kernel = kernel_of(one_shot_block<Order::kRank, Float, CpuTeam>);
Kernel two_shot_kernel = kernel_of(two_shot_block<Order::kRank, Float, CpuTeam>);
Kernel ring_kernel = kernel_of(ring_block<Float, CpuTeam>);
Kernel scatter = kernel_of(reduce_scatter_block<Order::kRank, Float, CpuTeam>);
Kernel gather = kernel_of(all_gather_block<CpuTeam>);
Kernel send = kernel_of(broadcast_block<CpuTeam>);

void add_all_reduce_kernels(KernelList& kernels) {
  for (Kernel* kernel : {&one_shot_kernel, &two_shot_kernel, &ring_kernel})
    kernels.push_back(kernel);
}
void add_reduce_scatter_kernels(KernelList& kernels) { kernels.push_back(&scatter); }
void add_all_gather_kernels(KernelList& kernels) { kernels.push_back(&gather); }
void add_broadcast_kernels(KernelList& kernels) { kernels.push_back(&send); }

// Writes of rank fake_cuda::fault.from to rank fault.to go wrong.
class FaultyTeam : public CpuTeam {
 public:
  FaultyTeam(const CpuTeam& team, const DeviceRanks& ranks) : CpuTeam(team), ranks_(ranks) {}

  void store_relaxed(uint64_t* word, uint64_t value) const { store(word, value); }
  void store_release(uint64_t* word, uint64_t value) const { store(word, value); }

 private:
  void store(uint64_t* word, uint64_t value) const {
    const auto* const memory = ranks_.memory[std::max(fake_cuda::fault.to, 0)];
    const auto offset = reinterpret_cast<std::byte*>(word) - memory;
    const bool to_peer = offset >= 0 && static_cast<size_t>(offset) < ranks_.layout.heap();
    const bool faulty = to_peer && ranks_.rank == fake_cuda::fault.from;
    const auto write = [=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); };
    if (faulty) return fake_cuda::go_wrong(write, word);
    write();
  }
  const DeviceRanks& ranks_;
};

void write_to_peers(CpuTeam& team, const DeviceLaunch& launch) {
  FaultyTeam faulty(team, launch.ranks);
  write_to_peers_block(faulty, launch);
}
Kernel write_kernel = kernel_of(write_to_peers);
Kernel compare_kernel = kernel_of(compare_with_peers_block<CpuTeam>);
PeerCheck peer_check() { return {&write_kernel, &compare_kernel}; }

bool has_nvlink(const cudaUUID_t&, const cudaUUID_t&) { return fake_cuda::nvlink; }

}  // namespace pipekernels
