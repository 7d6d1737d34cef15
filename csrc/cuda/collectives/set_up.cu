// How the ranks of a communicator set up their devices together.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "host/nvlink.cuh"
#include "host/runtime.cuh"
#include "pipekernels/collectives/all_gather.h"
#include "pipekernels/collectives/communicator.h"
#include "pipekernels/collectives/cuda_communicator.h"
#include "shared_memory/owned_memory.cuh"

namespace pipekernels {
namespace {

constexpr uint32_t kSetBytes = 128 << 10;
constexpr uint32_t kSlotBytes = 64 << 10;
constexpr uint32_t kMinChunkBytes = 16 << 10;  // Smallest chunk: two 16-byte packs per thread.
constexpr uint32_t kInboxBytes = 4 << 10;      // Four words of data for each thread.

KernelList all_kernels() {
  KernelList kernels;
  add_all_reduce_kernels(kernels);
  add_reduce_scatter_kernels(kernels);
  add_all_gather_kernels(kernels);
  add_broadcast_kernels(kernels);
  kernels.push_back(peer_check().write);
  kernels.push_back(peer_check().compare);
  return kernels;
}

// Loads all kernels now, since loading one later could wait for a running kernel that waits for
// this rank. Throws if the build has no code for this device.
void load_kernels() {
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();
      throw std::runtime_error(
          "this build of pipekernels has no code for its GPU; rebuild it with the GPU's "
          "architecture in CUDAARCHS");
    }
    check_cuda(status, "loading a kernel");
  }
}

}  // namespace

// What the ranks tell each other during set-up.
struct CudaCommunicator::SetupMessage {
  char problem[200];  // The error message if set-up has failed on this rank, else empty.
  cudaUUID_t device;
  int32_t multiprocessors;
  int32_t most_blocks;
  int32_t parents_rank;                   // In the parent whose heap it can share, or -1.
  bool slow_links;                        // What this rank knows.
  uint64_t unreached;                     // As in HostFlags.
  cudaIpcMemHandle_t handle;              // If the ranks are processes.
  std::shared_ptr<DeviceMemory>* memory;  // If they are threads; valid until the next exchange().
};

void CudaCommunicator::set_up(size_t symmetric_bytes, int most_blocks, CudaCommunicator* parent) {
  if (core_.world_size() > kMaxDeviceRanks) {
    throw std::runtime_error("CUDA collectives take at most " + std::to_string(kMaxDeviceRanks) +
                             " ranks of one host, got " + std::to_string(core_.world_size()));
  }
  ranks_.rank = core_.rank();
  ranks_.timeout = static_cast<uint64_t>(core_.timeout().count() * 1e9);
  const bool shares = parent != nullptr && parent->device_ == device_;
  agree_on_layout(most_blocks, shares ? parent->shared_memory() : SymmetricMemory{});
  share_memory(symmetric_bytes);
  check_peers();
}

// Gathers the messages of all ranks. Throws on all ranks if one of them reports a problem.
void CudaCommunicator::exchange(SetupMessage& mine, std::vector<SetupMessage>& all) {
  all.resize(core_.world_size());
  all_gather(core_, &mine, all.data(), sizeof(SetupMessage), DType::kUInt8);
  std::string problems;
  for (int rank = 0; rank < core_.world_size(); ++rank) {
    if (all[rank].problem[0] == '\0') continue;
    problems += (problems.empty() ? "" : "; ") + rank_name(rank) + ": " + all[rank].problem;
  }
  if (!problems.empty()) throw std::runtime_error("the ranks cannot use CUDA: " + problems);
}

namespace {

template <class Work>
void record_error(char (&problem)[200], Work work) {
  try {
    work();
  } catch (const std::exception& error) {
    std::snprintf(problem, sizeof(problem), "%s", error.what());
  }
}

}  // namespace

// Whether there are more than two devices, of which some pair is not joined by NVLink.
bool CudaCommunicator::lacks_nvlink(const std::vector<SetupMessage>& all) {
  std::vector<cudaUUID_t> devices;
  for (const SetupMessage& each : all) {
    const bool is_known = std::any_of(devices.begin(), devices.end(), [&](const cudaUUID_t& other) {
      return std::memcmp(&other, &each.device, sizeof(other)) == 0;
    });
    if (!is_known) devices.push_back(each.device);
  }
  for (size_t a = 0; devices.size() > 2 && a < devices.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (!has_nvlink(devices[a], devices[b])) return true;
    }
  }
  return false;
}

// If all ranks can share their parents' heaps, they do.
void CudaCommunicator::agree_on_layout(int most_blocks, SymmetricMemory parents) {
  SetupMessage mine{};
  mine.most_blocks = most_blocks;
  mine.parents_rank = parents.heap ? parents.rank : -1;
  record_error(mine.problem, [&] {
    const LaunchesPaused paused;
    const DeviceGuard guard(device_);
    load_kernels();
    void* flags = nullptr;
    check_cuda(
        cudaHostAlloc(&flags, sizeof(HostFlags), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
    flags_.reset(new (flags) HostFlags{});
    void* device_pointer = nullptr;
    check_cuda(cudaHostGetDevicePointer(&device_pointer, flags, 0), "cudaHostGetDevicePointer");
    ranks_.host = static_cast<HostFlags*>(device_pointer);
    make_events();
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    mine.device = properties.uuid;
    mine.multiprocessors = properties.multiProcessorCount;
  });
  std::vector<SetupMessage> all;
  exchange(mine, all);
  // The blocks of all ranks on a device must be resident together, or they would wait for blocks
  // that cannot start. So a device runs at most one block per multiprocessor.
  int blocks = std::min(most_blocks, kMaxDeviceBlocks);
  for (const SetupMessage& each : all) {
    if (each.most_blocks != all[0].most_blocks) {
      throw std::runtime_error("device_blocks must be the same on all ranks, got " +
                               std::to_string(all[0].most_blocks) + " on rank 0 and " +
                               std::to_string(each.most_blocks) + " on rank " +
                               std::to_string(&each - all.data()));
    }
    const auto sharers = std::count_if(all.begin(), all.end(), [&](const SetupMessage& other) {
      return std::memcmp(&other.device, &each.device, sizeof(each.device)) == 0;
    });
    if (each.parents_rank < 0) parents = {};
    blocks = std::min(blocks, each.multiprocessors / static_cast<int>(sharers));
  }
  slow_links_ = lacks_nvlink(all);
  if (blocks < 1) throw std::runtime_error("more ranks share a GPU than it has multiprocessors");
  const int n = core_.world_size();
  for (int rank = 0; rank < n; ++rank) {
    symmetric_.owners[rank] = parents.heap ? parents.owners[all[rank].parents_rank] : rank;
  }
  symmetric_.rank = core_.rank();
  symmetric_.heap = std::move(parents.heap);
  symmetric_.mapped = std::move(parents.mapped);
  ranks_.layout = {n, blocks, kSetBytes, kSlotBytes, kMinChunkBytes, kInboxBytes, push_limit(n)};
}

void CudaCommunicator::share_memory(size_t symmetric_bytes) {
  const size_t begin = (ranks_.layout.heap() + 511) / 512 * 512;
  const size_t heap = symmetric_.heap ? 0 : CudaHeap::first_bytes(symmetric_bytes);
  memory_ = std::make_shared<MappedMemory>(device_, segment_, core_.rank());
  std::shared_ptr<DeviceMemory>& own = memory_->own;
  SetupMessage mine{};
  record_error(mine.problem, [&] {
    const DeviceGuard guard(device_);
    own = std::make_shared<DeviceMemory>(device_, begin + heap,
                                         core_.is_threads() ? nullptr : segment_, core_.rank());
    if (!symmetric_.heap) {
      symmetric_.heap = std::make_shared<CudaHeap>(own, begin, symmetric_bytes, device_, core_);
      symmetric_.mapped = memory_;
    }
    const LaunchesPaused paused;
    check_cuda(cudaMemset(own->base(), 0, ranks_.layout.zeroed_bytes()), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    mine.memory = &own;
    if (!core_.is_threads()) {
      check_cuda(cudaIpcGetMemHandle(&mine.handle, own->base()), "cudaIpcGetMemHandle");
    }
  });
  std::vector<SetupMessage> all;
  exchange(mine, all);

  segment_->growth(core_.rank()).forget();
  SetupMessage outcome{};
  record_error(outcome.problem, [&] {
    const DeviceGuard guard(device_);
    segment_->state(core_.rank()).device_mapper.store(getpid(), std::memory_order_release);
    for (int peer = 0; peer < core_.world_size(); ++peer) {
      if (peer == core_.rank()) {
        memory_->bases[peer] = own->base();
      } else if (core_.is_threads()) {
        memory_->bases[peer] = memory_->adopt(*all[peer].memory);
      } else {
        memory_->bases[peer] = memory_->open(peer, all[peer].handle);
      }
      ranks_.memory[peer] = memory_->bases[peer];
      ranks_.heap[0][peer] = symmetric_.mapped->bases[symmetric_.owners[peer]];
    }
  });
  exchange(outcome, all);
}

// In the default stream, with nothing else of this rank.
void CudaCommunicator::run_check(const void* kernel) {
  const LaunchesPaused paused;
  const DeviceGuard guard(device_);
  DeviceLaunch launch{};
  launch.ranks = ranks_;
  launch.blocks = 1;
  void* arguments[] = {&launch};
  check_cuda(cudaLaunchKernel(kernel, dim3(1), dim3(kDeviceThreads), arguments, 0, nullptr),
             "checking the links to peers");
  check_cuda(cudaDeviceSynchronize(), "checking the links to peers");
}

void CudaCommunicator::check_peers() {
  if (world_size() == 1) return;
  std::vector<SetupMessage> all;
  SetupMessage mine{};
  record_error(mine.problem, [&] { run_check(peer_check().write); });
  exchange(mine, all);
  mine.slow_links = slow_links_;
  record_error(mine.problem, [&] {
    run_check(peer_check().compare);
    mine.unreached = __atomic_load_n(&flags_->unreached, __ATOMIC_ACQUIRE);
  });
  exchange(mine, all);
  for (int rank = 0; rank < world_size(); ++rank) {
    slow_links_ = slow_links_ || all[rank].slow_links;
    for (int peer = 0; peer < rank; ++peer) {
      if (((all[rank].unreached >> peer | all[peer].unreached >> rank) & 1) == 0) continue;
      broken_links_ += (broken_links_.empty() ? "ranks " : ", ") + std::to_string(peer) + " and " +
                       std::to_string(rank);
    }
  }
}

}  // namespace pipekernels
