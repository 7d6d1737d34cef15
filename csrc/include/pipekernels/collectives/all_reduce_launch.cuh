// How an all-reduce on CUDA is launched. The bodies of its thread blocks are in all_reduce/, a file
// per algorithm.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/elements/tree_order.h"
#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

// The algorithm that Algorithm::kAuto selects. A second step takes some 3 us, in which a link of
// 400 GB/s moves 1.2 MB. With one step a rank reads ranks - 1 tensors, with two steps the
// equivalent of 2 (ranks - 1) / ranks tensors. The limits are those that vLLM's tables of H100 and
// B200 with NVLink give (pull requests 24111 and 24532), not measurements of these kernels over
// links.
inline Algorithm choose_device_algorithm(size_t bytes, int ranks) {
  const size_t limit = ranks <= 2 ? 2 << 20 : ranks <= 4 ? 3 << 19 : 256 << 10;
  return bytes <= limit ? Algorithm::kOneShot : Algorithm::kTwoShot;
}

// The order of the kernel that runs `call`. The ring's knows both: partial results differ only in
// number.
inline Order kernel_order(const Call& call, Algorithm algorithm, int ranks) {
  return algorithm == Algorithm::kRing ? Order::kRank : order_of(call.reduction, ranks);
}

// The launch for `call`. `algorithm` must not be kAuto.
inline DeviceLaunch plan_all_reduce(const DeviceRanks& ranks, const Call& call, Algorithm algorithm,
                                    void* data, uint64_t location) {
  const size_t size = size_of(call.dtype);
  size_t limit = ranks.layout.set_bytes;
  if (algorithm == Algorithm::kRing) {
    limit =
        partial_stride(ranks.layout.slot_bytes, most_partials(ranks.layout.ranks, call.reduction),
                       partial_size_of(call.dtype)) *
        size;
  }
  size_t least = ranks.layout.min_chunk_bytes;
  const bool pushed = algorithm == Algorithm::kOneShot &&
                      order_of(call.reduction, ranks.layout.ranks) == Order::kRank &&
                      call.count * size <= ranks.layout.push_limit;
  if (pushed) {
    limit = ranks.layout.inbox_bytes;
    least = limit / 4;  // One word for each thread.
  }
  const DeviceGrid grid = plan_grid(call.count, size, limit, least, ranks.layout.blocks);
  auto* bytes = static_cast<std::byte*>(data);
  return {ranks, {call, location}, bytes, bytes, call.count, grid.chunk, grid.blocks, pushed};
}

}  // namespace pipekernels
