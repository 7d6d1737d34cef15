// The body of a thread block of all_reduce() in two steps.
#pragma once

#include "pipekernels/collectives/all_reduce/block.cuh"

namespace pipekernels {

template <Order order, class Type, class Team>
class TwoShotBlock : public AllReduceBlock<order, Type, Team> {
  using Base = AllReduceBlock<order, Type, Team>;
  using Base::at, Base::chunks_, Base::kSize, Base::me_, Base::collective_, Base::reduce;
  using Base::rounds_, Base::set_sources, Base::team_, Base::terms_;

 public:
  using Base::Base;

  // Every rank reduces its part of each chunk, and copies the parts that its peers have reduced: in
  // step k the parts of chunk k are staged, those of chunk k - 1 reduced, and those of chunk k - 2
  // copied. If all tensors are symmetric, the ranks read and write each other's in place, and
  // synchronise before the first chunk and after the last only.
  //
  // Each of these is written once, since compilers inline it wherever it stands: else its objects
  // would be placed in local memory. Hence also the forced inlining, which they do not choose for a
  // function this long.
  PK_HOST_DEVICE PK_FORCE_INLINE bool run() {
    bool in_place = false;
    PK_ROLLED
    for (size_t k = 0; k < rounds_ + 2; ++k) {
      const bool meets = k == 0 || k == rounds_ || (k < rounds_ && !in_place);
      if (k > 0 && k <= rounds_) reduce_part(k - 1, in_place);
      if (meets) {
        copy_in(k);
        collective_.signal();
      }
      if (k > 1 && !in_place) gather(k - 2);
      if (meets && !collective_.wait()) return false;
      if (k == 0) in_place = collective_.direct_ranks() == terms_;
    }
    if (!in_place) collective_.finish_rounds(rounds_);
    return true;
  }

 private:
  // Stages the parts of chunk k that peers reduce.
  PK_HOST_DEVICE PK_FORCE_INLINE void copy_in(size_t k) {
    if (k >= rounds_ || collective_.direct()) return;
    const ChunkRange chunk = chunks_(k);
    const ChunkRange own = part_of(chunk, me_, terms_, kSize);
    std::byte* staged = collective_.input(me_, k);
    PK_ROLLED
    for (int side = 0; side < 2; ++side) {  // What is before the own part, and what is after it.
      const size_t from = side == 0 ? 0 : own.begin - chunk.begin + own.count;
      const size_t to = side == 0 ? own.begin - chunk.begin : chunk.count;
      copy_block(team_, staged + from * kSize, at(chunk.begin + from), (to - from) * kSize);
    }
  }

  PK_HOST_DEVICE PK_FORCE_INLINE void reduce_part(size_t k, bool in_place) {
    const ChunkRange chunk = chunks_(k), own = part_of(chunk, me_, terms_, kSize);
    const size_t begin = own.begin * kSize;
    set_sources([&](int rank) -> const std::byte* {
      const std::byte* data = rank == me_ ? at(0) : collective_.data_of(rank);
      return data ? data + begin : collective_.input(rank, k) + (own.begin - chunk.begin) * kSize;
    });
    std::byte* result = collective_.result(me_, k);
    std::byte* data = at(own.begin);
    reduce(own, [&](size_t offset, auto unit) {
      if (!in_place) {
        store_unit(data + offset, unit);
        store_unit(result + offset, unit);
        return;
      }
      for (int rank = 0; rank < terms_; ++rank) {
        store_unit(collective_.data_of(rank) + begin + offset, unit);
      }
    });
  }

  PK_HOST_DEVICE PK_FORCE_INLINE void gather(size_t k) {
    const ChunkRange chunk = chunks_(k);
    for (int step = 1; step < terms_; ++step) {  // Starting with a different peer on each rank.
      const int rank = (me_ + step) % terms_;
      const ChunkRange part = part_of(chunk, rank, terms_, kSize);
      copy_block(team_, at(part.begin), collective_.result(rank, k), part.count * kSize);
    }
  }
};

template <Order order, class Type, class Team>
PK_HOST_DEVICE void two_shot_block(Team& team, const DeviceLaunch& launch) {
  run_all_reduce_block<TwoShotBlock<order, Type, Team>>(team, launch);
}

}  // namespace pipekernels
