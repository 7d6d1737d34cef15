// The body of a thread block of reduce_scatter() on CUDA, for a Team (see block_collective.h). The
// protocol is that of csrc/cpu/collectives/reduce_scatter.cpp.
#pragma once

#include "pipekernels/collectives/block_collective.h"
#include "pipekernels/collectives/device_chunks.h"
#include "pipekernels/elements/device_elements.h"
#include "pipekernels/elements/tree_order.h"

namespace pipekernels {

// One block's share of reducing this rank's slice of launch.count elements into launch.output.
// launch.input holds one slice per rank. `order` is order_of() the call.
template <Order order, class Type, class Team>
PK_HOST_DEVICE void reduce_scatter_block(Team& team, const DeviceLaunch& launch) {
  constexpr size_t kSize = sizeof(typename Type::Element);
  BlockCollective<Team> collective(team, launch);
  const Chunks chunks(launch, team.block());
  const size_t rounds = chunks.rounds();
  const int me = collective.rank(), terms = collective.ranks();
  const size_t stride = launch.chunk * kSize;  // Distance between a chunk's slices in the staging.

  const auto copy_in = [&](size_t k) {
    if (k >= rounds || collective.direct()) return;
    const ChunkRange chunk = chunks(k);
    for (int rank = 0; rank < terms; ++rank) {
      if (rank == me) continue;
      copy_block(team, collective.input(me, k) + rank * stride,
                 launch.input + (rank * launch.count + chunk.begin) * kSize, chunk.count * kSize);
    }
  };
  const auto reduce = [&](size_t k) {
    const ChunkRange chunk = chunks(k);
    const size_t offset = (me * launch.count + chunk.begin) * kSize;
    team.sync();  // The previous reduction has finished reading the sources.
    for (int rank = team.thread(); rank < terms; rank += team.threads()) {
      const std::byte* data = rank == me ? launch.input : collective.data_of(rank);
      team.shared().source[rank] = data ? data + offset : collective.input(rank, k) + me * stride;
    }
    team.sync();
    std::byte* output = launch.output + chunk.begin * kSize;
    reduce_block<Type, order>(team, team.shared().source, terms, chunk.count * kSize,
                              launch.descriptor.call.reduction, output,
                              launch.ranks.layout.wide_loads,
                              [&](size_t at, auto unit) { store_unit(output + at, unit); });
  };
  const auto body = [&] {
    copy_in(0);
    collective.signal();
    if (!collective.wait()) return false;
    const int direct = collective.direct_ranks();
    for (size_t k = 0; k < rounds; ++k) {
      reduce(k);
      if (k + 1 == rounds || direct == terms) continue;
      copy_in(k + 1);
      collective.signal();
      if (!collective.wait()) return false;
    }
    if (direct > 0) {  // Peers may read `input` until this wait.
      collective.signal();
      if (!collective.wait()) return false;
    }
    if (direct < terms) collective.finish_rounds(rounds);
    return true;
  };

  if (collective.begin() && body()) return collective.finish();
  for (size_t k = 0; k < rounds; ++k) {
    const ChunkRange chunk = chunks(k);
    poison_block(team, launch.output + chunk.begin * kSize, chunk.count * kSize);
  }
}

// The launch for `call`; call.count is that of the whole input, not of a slice.
inline DeviceLaunch plan_reduce_scatter(const DeviceRanks& ranks, const Call& call,
                                        const void* input, void* output, uint64_t location) {
  const DeviceLayout& layout = ranks.layout;
  const size_t count = call.count / layout.ranks;
  const DeviceGrid grid = plan_grid(count, size_of(call.dtype), layout.set_bytes / layout.ranks,
                                    layout.min_chunk_bytes / layout.ranks, layout.blocks);
  return {ranks,
          {call, location},
          static_cast<const std::byte*>(input),
          static_cast<std::byte*>(output),
          count,
          grid.chunk,
          grid.blocks,
          {}};
}

}  // namespace pipekernels
