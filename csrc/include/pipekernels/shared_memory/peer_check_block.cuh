// Whether ranks can use each other's device memory, found out before anything relies on it. Behind
// an IOMMU, PCI access control or a patched driver, writes to a peer may get lost or arrive
// changed, although the driver maps its memory.
//
// Every rank writes a page, and then a word, to each peer. Once all have done so, each compares
// what it got, and what it reads back over the link. A kernel that has ended has written all, so a
// write that arrives later is a failure too.
#pragma once

#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

constexpr int kCheckedWords = 4096 / sizeof(uint64_t) + 1;  // A page and a word.

// Of what `writer` writes to `reader`. Never 0, which is there before.
PK_HOST_DEVICE inline uint64_t checked_word(int writer, int reader, int i) {
  const uint64_t pair = writer * kMaxDeviceRanks + reader;
  return (pair * kCheckedWords + i + 1) * 0x9e3779b97f4a7c15u;
}

template <class Team>
PK_HOST_DEVICE void write_to_peers_block(Team& team, const DeviceLaunch& launch) {
  const DeviceRanks& ranks = launch.ranks;
  for (int peer = 0; peer < ranks.layout.ranks; ++peer) {
    if (peer == ranks.rank) continue;
    uint64_t* const there = ranks.layout.checked(ranks.memory[peer], ranks.rank);
    for (int i = team.thread(); i < kCheckedWords - 1; i += team.threads()) {
      team.store_relaxed(there + i, checked_word(ranks.rank, peer, i));
    }
    team.sync();
    if (team.thread() != 0) continue;
    team.store_release(there + kCheckedWords - 1,
                       checked_word(ranks.rank, peer, kCheckedWords - 1));
  }
}

// Sets bit r of HostFlags::unreached for each rank r whose link failed.
template <class Team>
PK_HOST_DEVICE void compare_with_peers_block(Team& team, const DeviceLaunch& launch) {
  const DeviceRanks& ranks = launch.ranks;
  uint64_t unreached = 0;
  for (int peer = 0; peer < ranks.layout.ranks; ++peer) {
    if (peer == ranks.rank) continue;
    const uint64_t* const here = ranks.layout.checked(ranks.memory[ranks.rank], peer);
    const uint64_t* const there = ranks.layout.checked(ranks.memory[peer], ranks.rank);
    bool differs = false;
    for (int i = team.thread(); i < kCheckedWords; i += team.threads()) {
      differs = differs || team.load_relaxed(here + i) != checked_word(peer, ranks.rank, i) ||
                team.load_relaxed(there + i) != checked_word(ranks.rank, peer, i);
    }
    if (team.any(differs)) unreached |= uint64_t{1} << peer;
  }
  if (team.thread() == 0) team.store_release(&ranks.host->unreached, unreached);
}

}  // namespace pipekernels
