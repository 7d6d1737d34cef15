// A rank of a CUDA communicator on the fake CUDA runtime, and what tests of it share.
#pragma once

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../check.h"
#include "../device_team.h"
#include "../ranks.h"
#include "cuda_runtime.h"
#include "pipekernels/collectives/all_gather_block.cuh"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/collectives/all_reduce_launch.cuh"
#include "pipekernels/collectives/broadcast_block.cuh"
#include "pipekernels/collectives/cuda_communicator.h"
#include "pipekernels/collectives/reduce_scatter_block.cuh"
#include "shared_memory/owned_memory.cuh"

namespace pipekernels {

using fake_cuda::Kernel;
using fake_cuda::Stream;
using Clock = std::chrono::steady_clock;

extern Kernel one_shot_kernel, two_shot_kernel, ring_kernel, scatter, gather, send;

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
