// What the algorithms of all_reduce() on CUDA share: a thread block's share of the work, for a Team
// (see block_collective.h).
//
// The protocols are those of csrc/cpu/collectives/all_reduce/ and ring_schedule.h, which also show
// why two sets of inputs, three sets of results and ring_depth() slots suffice. Here they hold
// between the blocks of the same index on all ranks.
#pragma once

#include "pipekernels/collectives/block_collective.h"
#include "pipekernels/collectives/device_chunks.h"
#include "pipekernels/elements/device_elements.h"

namespace pipekernels {

// One block's share of an all-reduce of this rank's tensor. `order` is that of kernel_order().
template <Order order, class Type, class Team>
class AllReduceBlock {
 public:
  PK_HOST_DEVICE explicit AllReduceBlock(BlockCollective<Team>& collective)
      : collective_(collective),
        team_(collective.team()),
        chunks_(collective.launch(), team_.block()),
        rounds_(chunks_.rounds()),
        me_(collective.rank()),
        terms_(collective.ranks()),
        reduction_(collective.launch().descriptor.call.reduction) {}

  // Overwrites this block's share of the output after a failure.
  PK_HOST_DEVICE void poison_output() {
    for (size_t k = 0; k < rounds_; ++k) {
      const ChunkRange chunk = chunks_(k);
      poison_block(team_, at(chunk.begin), chunk.count * kSize);
    }
  }

 protected:
  static constexpr size_t kSize = sizeof(typename Type::Element);

  PK_HOST_DEVICE std::byte* at(size_t element) const {
    return collective_.launch().output + element * kSize;
  }

  // Sets source(rank), for each rank, as the sources of reduce().
  template <class Source>
  PK_HOST_DEVICE void set_sources(Source source) {
    team_.sync();  // The previous reduction has finished reading the sources.
    for (int rank = team_.thread(); rank < terms_; rank += team_.threads()) {
      team_.shared().source[rank] = source(rank);
    }
    team_.sync();
  }
  // Reduces what set_sources() has set, and passes each unit to store(offset, unit).
  template <class Store>
  PK_HOST_DEVICE PK_FORCE_INLINE void reduce(const ChunkRange& range, Store store) {
    reduce_block<Type, order>(team_, team_.shared().source, terms_, range.count * kSize, reduction_,
                              nullptr, collective_.launch().ranks.layout.wide_loads, store);
  }

  BlockCollective<Team>& collective_;
  Team& team_;
  const Chunks chunks_;
  const size_t rounds_;
  const int me_, terms_;
  const Reduction reduction_;
};

// Runs a block's share of an all-reduce of launch.count elements at launch.output, in place.
template <class Block, class Team>
PK_HOST_DEVICE void run_all_reduce_block(Team& team, const DeviceLaunch& launch) {
  BlockCollective<Team> collective(team, launch);
  Block block(collective);
  const bool done = collective.begin() && block.run();
  done ? collective.finish() : block.poison_output();
}

}  // namespace pipekernels
