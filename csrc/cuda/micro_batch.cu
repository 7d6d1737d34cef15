#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pipekernels/micro_batch.h"
#include "pipekernels/micro_batch_plan.h"

namespace pipekernels {
namespace {

constexpr int kThreads = 256;
constexpr TileShape kTiles{16 * 1024, 16 * 1024};

// Copies travel as kernel parameters, so nothing has to be copied to the device before the launch.
template <int kCapacity>
struct Launch {
  TiledCopy copies[kCapacity];
  int32_t count;
  int64_t first_tile, end_tile;
};

constexpr int kFewCopies = 28;
constexpr int kManyCopies = CUDART_VERSION >= 12010 ? 240 : kFewCopies;
static_assert(sizeof(Launch<kFewCopies>) <= 4096, "the limit of kernel parameters");
static_assert(sizeof(Launch<kManyCopies>) <= 32764, "the limit since CUDA 12.1");

// Neighbouring threads take neighbouring units of a row: reads and writes coalesce.
template <typename Unit>
__device__ void copy_runs(const TiledCopy& copy, const Tile& tile) {
  constexpr int kInFlight = 4;  // loads that a thread issues before its first store
  const int units = tile.rows * tile.cols;
  for (int first = threadIdx.x; first < units; first += kInFlight * kThreads) {
    Unit held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int i = first + k * kThreads;
      const int row = i / tile.cols, col = i - row * tile.cols;
      if (i < units) {
        held[k] =
            *reinterpret_cast<const Unit*>(tile.src + row * copy.src_row + col * copy.src_col);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int i = first + k * kThreads;
      const int row = i / tile.cols, col = i - row * tile.cols;
      if (i < units) {
        *reinterpret_cast<Unit*>(tile.dst + row * copy.dst_row + col * copy.dst_col) = held[k];
      }
    }
  }
}

// Reads along the source's fastest dimension and writes along the destination's, through shared
// memory.
template <typename Unit>
__device__ void copy_transposed(const TiledCopy& copy, const Tile& tile, char* memory) {
  auto* staged = reinterpret_cast<Unit*>(memory);
  const int pitch = tile.rows | 1;  // odd, so that columns fall into different banks
  const int units = tile.rows * tile.cols;
  __syncthreads();  // the previous tile has left shared memory
  for (int i = threadIdx.x; i < units; i += kThreads) {
    const int col = i / tile.rows, row = i - col * tile.rows;
    staged[col * pitch + row] =
        *reinterpret_cast<const Unit*>(tile.src + row * copy.src_row + col * copy.src_col);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < units; i += kThreads) {
    const int row = i / tile.cols, col = i - row * tile.cols;
    *reinterpret_cast<Unit*>(tile.dst + row * copy.dst_row + col * copy.dst_col) =
        staged[col * pitch + row];
  }
}

template <typename Unit>
__device__ void copy_tile(const TiledCopy& copy, const Tile& tile, char* memory) {
  if (copy.transposed) {
    copy_transposed<Unit>(copy, tile, memory);
  } else {
    copy_runs<Unit>(copy, tile);
  }
}

// A block takes one tile at a time; all its threads see the same tile, so branches do not diverge.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    copy_micro_batches_kernel(const __grid_constant__ Launch<kCapacity> launch) {
  // Tiles have at least two rows, so one unit of padding per column is at most half as much again.
  __shared__ __align__(16) char memory[kTiles.transposed_bytes * 3 / 2];
  for (int64_t index = launch.first_tile + blockIdx.x; index < launch.end_tile;
       index += gridDim.x) {
    const TiledCopy& copy = launch.copies[copy_of_tile(launch.copies, launch.count, index)];
    const Tile tile = tile_at(copy, index);
    switch (copy.unit) {
      case 1:
        copy_tile<uint8_t>(copy, tile, memory);
        break;
      case 2:
        copy_tile<uint16_t>(copy, tile, memory);
        break;
      case 4:
        copy_tile<uint32_t>(copy, tile, memory);
        break;
      case 8:
        copy_tile<uint2>(copy, tile, memory);
        break;
      default:
        copy_tile<uint4>(copy, tile, memory);
        break;
    }
  }
}

// Launches copies [begin, end) of the plan, at most kCapacity of them.
template <int kCapacity>
void launch(const Plan& plan, size_t begin, size_t end, cudaStream_t stream) {
  Launch<kCapacity> parameters;
  std::copy(plan.copies.begin() + begin, plan.copies.begin() + end, parameters.copies);
  parameters.count = static_cast<int32_t>(end - begin);
  parameters.first_tile = plan.copies[begin].first_tile;
  parameters.end_tile = plan.copies[end - 1].first_tile + plan.copies[end - 1].tiles();
  const int64_t tiles = parameters.end_tile - parameters.first_tile;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, 1 << 20));
  copy_micro_batches_kernel<kCapacity><<<blocks, kThreads, 0, stream>>>(parameters);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("copy_micro_batches_cuda: ") + cudaGetErrorString(status));
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

}  // namespace pipekernels
