// The body of a thread block of broadcast() on CUDA, for a Team (see block_collective.h).
#pragma once

#include "pipekernels/collectives/block_collective.h"
#include "pipekernels/collectives/device_chunks.h"
#include "pipekernels/elements/device_elements.h"

namespace pipekernels {

// One block's share of copying launch.count bytes of the root to launch.output of all other ranks.
template <class Team>
class BroadcastBlock {
 public:
  PK_HOST_DEVICE explicit BroadcastBlock(BlockCollective<Team>& collective)
      : collective_(collective),
        team_(collective.team()),
        chunks_(collective.launch(), team_.block()),
        rounds_(chunks_.rounds()),
        me_(collective.rank()),
        root_(static_cast<int>(collective.launch().descriptor.call.root)) {}

  // Every rank reads all data of the root. The protocol is that of
  // csrc/cpu/collectives/broadcast.cpp.
  PK_HOST_DEVICE bool one_shot() {
    const auto copy_in = [&](size_t k) {
      if (k >= rounds_ || me_ != root_ || collective_.direct()) return;
      const ChunkRange chunk = chunks_(k);
      copy_block(team_, collective_.result(me_, k), at(chunk.begin), chunk.count);
    };
    copy_in(0);
    collective_.signal();
    if (!collective_.wait()) return false;
    const std::byte* data = collective_.data_of(root_);
    for (size_t k = 0; k < rounds_; ++k) {
      const bool more = data == nullptr && k + 1 < rounds_;
      if (more) {
        copy_in(k + 1);
        collective_.signal();
      }
      const ChunkRange chunk = chunks_(k);
      if (me_ != root_) {
        copy_block(team_, at(chunk.begin), data ? data + chunk.begin : collective_.result(root_, k),
                   chunk.count);
      }
      if (more && !collective_.wait()) return false;
    }
    if (data != nullptr) return part();
    collective_.finish_rounds(rounds_);
    return true;
  }

  // Every rank reads its part of each chunk from the root, and the parts of its peers from them, so
  // that the root sends no more than the data once. The protocol is that of the all-reduce's
  // two_shot(): the parts take the place of what the ranks have reduced.
  PK_HOST_DEVICE bool two_shot() {
    copy_in(0);
    collective_.signal();
    if (!collective_.wait()) return false;
    for (size_t k = 0; k < rounds_; ++k) {
      if (me_ != root_) scatter(k);
      copy_in(k + 1);
      collective_.signal();
      if (k > 0) gather(k - 1);
      if (!collective_.wait()) return false;
    }
    if (rounds_ > 0) gather(rounds_ - 1);
    collective_.finish_rounds(rounds_);
    return collective_.direct_ranks() == 0 || part();
  }

  // Overwrites this block's share of the output after a failure.
  PK_HOST_DEVICE void poison_output() {
    for (size_t k = 0; k < rounds_ && me_ != root_; ++k) {
      const ChunkRange chunk = chunks_(k);
      poison_block(team_, at(chunk.begin), chunk.count);
    }
  }

 private:
  PK_HOST_DEVICE std::byte* at(size_t byte) const { return collective_.launch().output + byte; }

  // Waits until no peer reads this rank's data any more.
  PK_HOST_DEVICE bool part() {
    collective_.signal();
    return collective_.wait();
  }

  PK_HOST_DEVICE ChunkRange part_of_rank(const ChunkRange& chunk, int rank) const {
    return part_of(chunk, rank < root_ ? rank : rank - 1, collective_.ranks() - 1, 1);
  }
  PK_HOST_DEVICE void copy_in(size_t k) {
    if (k >= rounds_ || me_ != root_ || collective_.direct()) return;
    const ChunkRange chunk = chunks_(k);
    copy_block(team_, collective_.input(me_, k), at(chunk.begin), chunk.count);
  }
  PK_HOST_DEVICE void scatter(size_t k) {
    const ChunkRange chunk = chunks_(k), own = part_of_rank(chunk, me_);
    const std::byte* data = collective_.data_of(root_);
    const std::byte* from =
        data ? data + own.begin : collective_.input(root_, k) + (own.begin - chunk.begin);
    copy_block(team_, at(own.begin), from, own.count);
    if (!collective_.direct()) copy_block(team_, collective_.result(me_, k), from, own.count);
  }
  PK_HOST_DEVICE void gather(size_t k) {
    if (me_ == root_) return;
    const ChunkRange chunk = chunks_(k);
    for (int step = 1; step < collective_.ranks(); ++step) {  // Another peer first on each rank.
      const int rank = (me_ + step) % collective_.ranks();
      if (rank == root_) continue;
      const ChunkRange part = part_of_rank(chunk, rank);
      const std::byte* data = collective_.data_of(rank);
      copy_block(team_, at(part.begin), data ? data + part.begin : collective_.result(rank, k),
                 part.count);
    }
  }

  BlockCollective<Team>& collective_;
  Team& team_;
  const Chunks chunks_;
  const size_t rounds_;
  const int me_, root_;
};

template <class Team>
PK_HOST_DEVICE void broadcast_block(Team& team, const DeviceLaunch& launch) {
  BlockCollective<Team> collective(team, launch);
  BroadcastBlock<Team> block(collective);
  const bool two_shot = launch.descriptor.call.algorithm == Algorithm::kTwoShot;
  if (collective.begin() && (two_shot ? block.two_shot() : block.one_shot())) {
    collective.finish();
  } else {
    block.poison_output();
  }
}

// A root that sends everything to each rank limits large broadcasts to its own link. An estimate,
// not a measurement; as choose_device_algorithm().
inline Algorithm choose_broadcast(size_t bytes, int ranks) {
  return ranks > 2 && bytes > 1 << 20 ? Algorithm::kTwoShot : Algorithm::kOneShot;
}

// The algorithm is that of `call`, kOneShot or kTwoShot.
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
