// The body of a thread block of all_gather() on CUDA, for a Team (see block_collective.h). The
// protocol is that of csrc/cpu/collectives/all_gather.cpp.
#pragma once

#include "pipekernels/collectives/block_collective.h"
#include "pipekernels/collectives/device_chunks.h"
#include "pipekernels/elements/device_elements.h"

namespace pipekernels {

// One block's share of gathering launch.count bytes per rank from launch.input into launch.output.
template <class Team>
PK_HOST_DEVICE void all_gather_block(Team& team, const DeviceLaunch& launch) {
  BlockCollective<Team> collective(team, launch);
  const Chunks chunks(launch, team.block());
  const size_t rounds = chunks.rounds();
  const int me = collective.rank(), ranks = collective.ranks();

  const auto copy_in = [&](size_t k) {
    if (k >= rounds || collective.direct()) return;
    const ChunkRange chunk = chunks(k);
    copy_block(team, collective.result(me, k), launch.input + chunk.begin, chunk.count);
  };
  const auto gather = [&](size_t k) {
    const ChunkRange chunk = chunks(k);
    for (int step = 0; step < ranks; ++step) {  // Starting with a different peer on each rank.
      const int rank = (me + step) % ranks;
      const std::byte* data = rank == me ? launch.input : collective.data_of(rank);
      copy_block(team, launch.output + rank * launch.count + chunk.begin,
                 data ? data + chunk.begin : collective.result(rank, k), chunk.count);
    }
  };
  const auto body = [&] {
    copy_in(0);
    collective.signal();
    if (!collective.wait()) return false;
    const int direct = collective.direct_ranks();
    const bool uses_staging = direct < ranks;
    for (size_t k = 0; k < rounds; ++k) {
      const bool more = uses_staging && k + 1 < rounds;
      if (more) {
        copy_in(k + 1);
        collective.signal();
      }
      gather(k);
      if (more && !collective.wait()) return false;
    }
    if (direct > 0) {  // Peers may read `input` until this wait.
      collective.signal();
      if (!collective.wait()) return false;
    }
    if (uses_staging) collective.finish_rounds(rounds);
    return true;
  };

  if (collective.begin() && body()) return collective.finish();
  for (size_t k = 0; k < rounds; ++k) {
    const ChunkRange chunk = chunks(k);
    for (int rank = 0; rank < ranks; ++rank) {
      std::byte* part = launch.output + rank * launch.count + chunk.begin;
      if (part != launch.input + chunk.begin) poison_block(team, part, chunk.count);
    }
  }
}

inline DeviceLaunch plan_all_gather(const DeviceRanks& ranks, const Call& call, const void* input,
                                    void* output, uint64_t location) {
  const DeviceLayout& layout = ranks.layout;
  const size_t bytes = call.count * size_of(call.dtype);
  const DeviceGrid grid =
      plan_grid(bytes, 1, layout.set_bytes, layout.min_chunk_bytes, layout.blocks);
  return {ranks,
          {call, location},
          static_cast<const std::byte*>(input),
          static_cast<std::byte*>(output),
          bytes,
          grid.chunk,
          grid.blocks,
          {}};
}

}  // namespace pipekernels
