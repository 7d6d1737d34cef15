// A rank of a CUDA communicator on the fake CUDA runtime, and what tests of it share. To be
// included by one file of a program: it defines the host code of csrc/cuda.
#pragma once

#include <signal.h>

#include <chrono>
#include <cstdlib>

#include "../device_team.h"
#include "../ranks.h"
#include "collectives/communicator.cu"
#include "collectives/set_up.cu"
#include "pipekernels/collectives/all_gather_block.cuh"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/collectives/all_reduce/one_shot.cuh"
#include "pipekernels/collectives/all_reduce/ring.cuh"
#include "pipekernels/collectives/all_reduce/two_shot.cuh"
#include "pipekernels/collectives/all_reduce_launch.cuh"
#include "pipekernels/collectives/broadcast_block.cuh"
#include "pipekernels/collectives/reduce_scatter_block.cuh"
#include "pipekernels/shared_memory/peer_check_block.cuh"
#include "shared_memory/symmetric_heap.cu"

namespace pipekernels {

using fake_cuda::Kernel;
using fake_cuda::Stream;
using Float = ElementOf<DType::kFloat32>;

constexpr int kThreadsOfBlock = 2;

inline Kernel kernel_of(void (*body)(CpuTeam&, const DeviceLaunch&)) {
  return {sizeof(DeviceLaunch), [body](const std::byte* argument) {
            DeviceLaunch launch;
            std::memcpy(static_cast<void*>(&launch), argument, sizeof(launch));
            run_stream({{launch, body}}, launch.blocks, kThreadsOfBlock);
          }};
}

inline Kernel one_shot_kernel = kernel_of(one_shot_block<Order::kRank, Float, CpuTeam>);
inline Kernel two_shot_kernel = kernel_of(two_shot_block<Order::kRank, Float, CpuTeam>);
inline Kernel ring_kernel = kernel_of(ring_block<Float, CpuTeam>);
inline Kernel scatter = kernel_of(reduce_scatter_block<Order::kRank, Float, CpuTeam>);
inline Kernel gather = kernel_of(all_gather_block<CpuTeam>);
inline Kernel send = kernel_of(broadcast_block<CpuTeam>);

inline void add_all_reduce_kernels(KernelList& kernels) {
  for (Kernel* kernel : {&one_shot_kernel, &two_shot_kernel, &ring_kernel})
    kernels.push_back(kernel);
}
inline void add_reduce_scatter_kernels(KernelList& kernels) { kernels.push_back(&scatter); }
inline void add_all_gather_kernels(KernelList& kernels) { kernels.push_back(&gather); }
inline void add_broadcast_kernels(KernelList& kernels) { kernels.push_back(&send); }

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

inline void write_to_peers(CpuTeam& team, const DeviceLaunch& launch) {
  FaultyTeam faulty(team, launch.ranks);
  write_to_peers_block(faulty, launch);
}
inline Kernel write_kernel = kernel_of(write_to_peers);
inline Kernel compare_kernel = kernel_of(compare_with_peers_block<CpuTeam>);
inline PeerCheck peer_check() { return {&write_kernel, &compare_kernel}; }

inline bool has_nvlink(const cudaUUID_t&, const cudaUUID_t&) { return fake_cuda::nvlink; }

constexpr size_t kHeap = 1 << 20;
constexpr Algorithm kFixedAlgorithms[] = {Algorithm::kOneShot, Algorithm::kTwoShot,
                                          Algorithm::kRing};

// One rank with its own stream.
struct Rank {
  explicit Rank(Communicator& core, size_t heap = kHeap, CudaCommunicator* parent = nullptr)
      : cuda(core, 0, heap, kMaxDeviceBlocks, parent), stream(fake_cuda::make_stream()) {}

  uint64_t location_of(const float* data, size_t count) {
    return cuda.location_of(data, count * sizeof(float), stream);
  }
  void all_reduce(float* data, size_t count, Algorithm way = Algorithm::kTwoShot) {
    all_reduce_in(stream, data, count, way);
  }
  void all_reduce_in(Stream* in, float* data, size_t count, Algorithm way) {
    const Call call{Operation::kAllReduce, DType::kFloat32, {}, way, 0, 0, count};
    const Kernel& kernel = way == Algorithm::kOneShot   ? one_shot_kernel
                           : way == Algorithm::kTwoShot ? two_shot_kernel
                                                        : ring_kernel;
    cuda.launch(&kernel, plan_all_reduce(cuda.ranks(), call, way, data, location_of(data, count)),
                {in, true});
  }
  void reduce_scatter(const float* input, float* output, size_t count) {
    const Call call{Operation::kReduceScatter, DType::kFloat32, {}, {}, 0, 0, count};
    cuda.launch(&scatter,
                plan_reduce_scatter(cuda.ranks(), call, input, output, location_of(input, count)),
                {stream, true});
  }
  void all_gather(const float* input, float* output, size_t count) {
    const Call call{Operation::kAllGather, DType::kFloat32, {}, {}, 0, 0, count};
    cuda.launch(&gather,
                plan_all_gather(cuda.ranks(), call, input, output, location_of(input, count)),
                {stream, true});
  }
  void broadcast(float* data, size_t count, int root) {
    const auto from = static_cast<uint32_t>(root);
    const auto way = cuda.world_size() > 1 ? Algorithm::kTwoShot : Algorithm::kOneShot;
    const Call call{Operation::kBroadcast, DType::kFloat32, {}, way, from, 0, count};
    cuda.launch(&send, plan_broadcast(cuda.ranks(), call, data, location_of(data, count)),
                {stream, true});
  }
  std::unique_ptr<CudaBuffer> allocate(size_t count, Stream* in) {
    return cuda.allocate(count * sizeof(float), in);
  }

  int number() const { return cuda.rank(); }
  // The sum over ranks if rank r contributes r + 1.
  float sum() const { return static_cast<float>(cuda.world_size() * (cuda.world_size() + 1)) / 2; }

  CudaCommunicator cuda;
  Stream* const stream;
};

inline float* floats(const CudaBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

inline bool all_are(const float* data, size_t count, float value) {
  return std::all_of(data, data + count, [value](float v) { return v == value; });
}

// The message of the Error that body() must throw.
template <class Error, class Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  CHECK(!"nothing has been thrown");
  return "";
}

inline bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace pipekernels
