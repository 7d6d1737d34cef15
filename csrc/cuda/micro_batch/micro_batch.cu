#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "host/runtime.cuh"
#include "pipekernels/micro_batch/micro_batch.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"
#include "pipekernels/micro_batch/micro_batch_tile.h"

namespace pipekernels {
namespace {

// A thread holds four units, so a tile of 16-byte units takes one round of loads and one of stores.
// With up to 64 registers, four blocks fit on a multiprocessor, with 64 KiB in flight: several
// times bandwidth x latency (an H200 reads some 16 bytes per ns and multiprocessor, with less than
// 1000 ns latency). Loads and stores use the L2 cache normally, since the next kernel reads what
// this one writes.
constexpr int kThreads = 256;
constexpr TileShape kTiles{16 * 1024, 16 * 1024};

// Passes the copies as kernel parameters, so nothing is copied to the device before the launch.
template <int kCapacity>
struct Launch {
  TiledCopy copies[kCapacity];
  int32_t count;
  int64_t first_tile;
};

constexpr int kFewCopies = 22;
constexpr int kManyCopies = CUDART_VERSION >= 12010 ? 177 : kFewCopies;
static_assert(sizeof(Launch<kFewCopies>) <= 4096, "the limit of kernel parameters");
static_assert(sizeof(Launch<kManyCopies>) <= 32764, "the limit since CUDA 12.1");

template <typename Unit, bool kCasts>
__device__ void copy_tile(const TiledCopy& copy, const Tile& tile, char* memory) {
  if (!copy.transposed) {
    copy_rows<Unit, kCasts>(copy, tile, threadIdx.x, kThreads);
    return;
  }
  if constexpr (sizeof(Unit) < 4) {
    constexpr int kPack = 4 / sizeof(Unit);
    if (copy.pack > 1) {
      stage_packed<kPack>(copy, tile, memory, threadIdx.x, kThreads);
      __syncthreads();
      write_packed<kPack>(copy, tile, memory, threadIdx.x, kThreads);
      return;
    }
  }
  stage_columns<Unit>(copy, tile, memory, threadIdx.x, kThreads);
  __syncthreads();
  write_rows<Unit, kCasts>(copy, tile, memory, threadIdx.x, kThreads);
}

// A block copies one tile; all its threads see the same tile, so branches do not diverge. A loop
// over tiles would have compilers keep in registers what each of the branches needs. Casts are
// instantiated separately, since they make the kernel large.
template <int kCapacity, bool kCasts>
__global__ void __launch_bounds__(kThreads)
    copy_micro_batches_kernel(const __grid_constant__ Launch<kCapacity> launch) {
  __shared__ __align__(16) char memory[staged_bytes(kTiles.transposed_bytes)];
  const int64_t index = launch.first_tile + blockIdx.x;
  const TiledCopy& copy = launch.copies[copy_of_tile(launch.copies, launch.count, index)];
  const Tile tile = tile_at(copy, index);
  switch (copy.src_unit) {
    case 1:
      copy_tile<uint8_t, kCasts>(copy, tile, memory);
      break;
    case 2:
      copy_tile<uint16_t, kCasts>(copy, tile, memory);
      break;
    case 4:
      copy_tile<uint32_t, kCasts>(copy, tile, memory);
      break;
    case 8:
      copy_tile<uint64_t, kCasts>(copy, tile, memory);
      break;
    default:
      copy_tile<Unit16, kCasts>(copy, tile, memory);
      break;
  }
}

// Launches copies [begin, end) of the plan, at most kCapacity of them.
template <int kCapacity>
void launch(const Plan& plan, size_t begin, size_t end, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
  Launch<kCapacity> parameters;
  std::copy(plan.copies.begin() + begin, plan.copies.begin() + end, parameters.copies);
  parameters.count = static_cast<int32_t>(end - begin);
  const int64_t end_tile = plan.copies[end - 1].first_tile + plan.copies[end - 1].tiles();
  for (int64_t tile = plan.copies[begin].first_tile; tile < end_tile; tile += kMostBlocks) {
    parameters.first_tile = tile;
    const auto blocks = static_cast<unsigned>(std::min(end_tile - tile, kMostBlocks));
    if (plan.casts) {
      copy_micro_batches_kernel<kCapacity, true><<<blocks, kThreads, 0, stream>>>(parameters);
    } else {
      copy_micro_batches_kernel<kCapacity, false><<<blocks, kThreads, 0, stream>>>(parameters);
    }
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
      throw std::runtime_error(std::string("copy_micro_batches_cuda: ") +
                               cudaGetErrorString(status));
    }
  }
}

}  // namespace

void copy_micro_batches_cuda(const MicroBatchCopy& request, void* stream) {
  const Plan plan = plan_tiles(request, kTiles);
  const size_t count = plan.copies.size();
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (count > 0 && count <= kFewCopies) {
    launch<kFewCopies>(plan, 0, count, cuda_stream);
    return;
  }
  for (size_t begin = 0; begin < count; begin += kManyCopies) {
    launch<kManyCopies>(plan, begin, std::min<size_t>(count, begin + kManyCopies), cuda_stream);
  }
}

void copy_micro_batches_cuda(const MicroBatchCopy& request, int device, void* stream) {
  const DeviceGuard guard(device);
  copy_micro_batches_cuda(request, stream);
}

}  // namespace pipekernels
