// The body of a thread block of broadcast() on CUDA, for a Team (see device_meeting.h). The
// protocol is that of csrc/cpu/collectives/broadcast.cpp.
#pragma once

#include "pipekernels/collectives/device_chunks.h"
#include "pipekernels/collectives/device_meeting.h"
#include "pipekernels/elements/device_elements.h"

namespace pipekernels {

// One block's share of copying launch.count bytes of the root to launch.output of all other ranks.
template <class Team>
PK_HOST_DEVICE void broadcast_block(Team& team, const DeviceLaunch& launch) {
  Meeting<Team> meeting(team, launch);
  const Chunks chunks(launch, team.block());
  const size_t rounds = chunks.rounds();
  const int me = meeting.rank();
  const int root = static_cast<int>(launch.descriptor.call.root);

  const auto copy_in = [&](size_t k) {
    if (k >= rounds || me != root || meeting.direct()) return;
    const ChunkRange chunk = chunks(k);
    copy_block(team, meeting.result(me, k), launch.output + chunk.begin, chunk.count);
  };
  const auto body = [&] {
    copy_in(0);
    meeting.signal();
    if (!meeting.wait()) return false;
    const std::byte* data = meeting.data_of(root);
    for (size_t k = 0; k < rounds; ++k) {
      const bool more = data == nullptr && k + 1 < rounds;
      if (more) {
        copy_in(k + 1);
        meeting.signal();
      }
      const ChunkRange chunk = chunks(k);
      if (me != root) {
        copy_block(team, launch.output + chunk.begin,
                   data ? data + chunk.begin : meeting.result(root, k), chunk.count);
      }
      if (more && !meeting.wait()) return false;
    }
    if (data != nullptr) {  // Peers may read the root's data until this wait.
      meeting.signal();
      return meeting.wait();
    }
    meeting.finish_rounds(rounds);
    return true;
  };

  if (meeting.begin() && body()) return meeting.finish();
  for (size_t k = 0; k < rounds && me != root; ++k) {
    const ChunkRange chunk = chunks(k);
    poison_block(team, launch.output + chunk.begin, chunk.count);
  }
}

inline DeviceLaunch plan_broadcast(const DeviceRanks& ranks, const Call& call, void* data,
                                   uint64_t location) {
  const DeviceLayout& layout = ranks.layout;
  const size_t bytes = call.count * size_of(call.dtype);
  const DeviceGrid grid =
      plan_grid(bytes, 1, layout.set_bytes, layout.min_chunk_bytes, layout.blocks);
  auto* start = static_cast<std::byte*>(data);
  return {ranks, {call, location}, start, start, bytes, grid.chunk, grid.blocks, {}};
}

}  // namespace pipekernels
