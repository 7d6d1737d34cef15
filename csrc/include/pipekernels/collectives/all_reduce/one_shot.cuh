// The body of a thread block of all_reduce() in one step.
#pragma once

#include <type_traits>

#include "pipekernels/collectives/all_reduce/block.cuh"

namespace pipekernels {

template <Order order, class Type, class Team>
class OneShotBlock : public AllReduceBlock<order, Type, Team> {
  using Base = AllReduceBlock<order, Type, Team>;
  using Base::at, Base::chunks_, Base::kSize, Base::me_, Base::collective_, Base::reduce;
  using Base::reduction_, Base::rounds_, Base::set_sources, Base::team_, Base::terms_;

 public:
  using Base::Base;

  PK_HOST_DEVICE bool run() {
    if constexpr (order == Order::kRank) {
      if (collective_.launch().pushed) return pushed();
    }
    return staged();
  }

 private:
  // Every rank copies its tensor to its staging, and reduces the staged tensors of all ranks.
  PK_HOST_DEVICE bool staged() {
    for (size_t k = 0; k == 0 || k < rounds_; ++k) {
      const ChunkRange chunk = k < rounds_ ? chunks_(k) : ChunkRange{0, 0};
      copy_block(team_, collective_.input(me_, k), at(chunk.begin), chunk.count * kSize);
      collective_.signal();
      if (!collective_.wait()) return false;
      set_sources(
          [&](int rank) { return rank == me_ ? at(chunk.begin) : collective_.input(rank, k); });
      std::byte* data = at(chunk.begin);
      reduce(chunk, [&](size_t offset, auto unit) { store_unit(data + offset, unit); });
    }
    collective_.finish_rounds(rounds_);
    return true;
  }

  // The same with less latency, for small tensors: every rank pushes its data into inboxes of its
  // peers, in words of 4 bytes of data and 4 bytes of flag. Each word is one relaxed access of 8
  // bytes, which is atomic, so who reads the flag of a round has read the data of that round; no
  // fence orders anything.
  //
  // Two inboxes suffice. A rank overwrites a word of round n in round n + 2, after it has received
  // something of every peer's round n + 1 (data, or the call). A peer pushes that only after its
  // polls of round n have ended, in all threads of the block, as end_pushes() finds by any(). So if
  // a word is overwritten, the poll that waits for it has already read it. Nothing is ordered by
  // this but through what the pushes depend on (PTX's axiom No-Thin-Air): a sync() in place of
  // that any(), on which no push depends, would not do. Nor does such a call order any other memory
  // of the ranks, as one with signals does.
  PK_HOST_DEVICE bool pushed() {
    for (size_t k = 0; k == 0 || k < rounds_; ++k) {
      const ChunkRange chunk = k < rounds_ ? chunks_(k) : ChunkRange{0, 0};
      const uint32_t bytes = static_cast<uint32_t>(chunk.count * kSize);
      const uint32_t units = (bytes + sizeof(PushUnit) - 1) / sizeof(PushUnit);
      std::byte* data = at(chunk.begin);
      if (!collective_.begin_pushes()) return false;
      if (k == 0) collective_.push_call();
      PK_ROLLED
      for (uint32_t i = team_.thread(); i < units; i += team_.threads()) {
        const PushUnit own = load_push_unit(data, i, bytes);
        int peer = me_;  // Another peer first on each rank.
        PK_ROLLED
        for (int step = 1; step < terms_; ++step) {
          peer = peer + 1 < terms_ ? peer + 1 : 0;
          collective_.push_unit(peer, i, own);
        }
      }
      bool arrived = k > 0 || collective_.wait_calls();
      PK_ROLLED
      for (uint32_t i = team_.thread(); i < units && arrived; i += team_.threads()) {
        arrived = reduce_pushed(data, i, bytes);
      }
      if (!collective_.end_pushes(arrived)) return false;
    }
    return true;
  }

  using Element = typename Type::Element;
  using PushUnit = std::conditional_t<kSize == 8, uint64_t, uint32_t>;
  static constexpr int kPushElements = sizeof(PushUnit) / kSize;

  // Unit i of `bytes` of data. The last one may be partial, and the data need only be aligned to
  // their elements.
  PK_HOST_DEVICE static bool is_whole(const std::byte* data, uint32_t i, uint32_t bytes) {
    return is_aligned(data, data, sizeof(PushUnit)) && (i + 1) * sizeof(PushUnit) <= bytes;
  }
  PK_HOST_DEVICE static PushUnit load_push_unit(const std::byte* data, uint32_t i, uint32_t bytes) {
    const std::byte* from = data + i * sizeof(PushUnit);
    if (is_whole(data, i, bytes)) return load_unit<PushUnit>(from);
    Element elements[kPushElements] = {};
    PK_UNROLL
    for (int e = 0; e < kPushElements; ++e) {
      if (i * sizeof(PushUnit) + e * kSize < bytes) {
        elements[e] = load_unit<Element>(from + e * kSize);
      }
    }
    PushUnit unit;
    memcpy(&unit, elements, sizeof(unit));
    return unit;
  }
  PK_HOST_DEVICE static void store_push_unit(std::byte* data, uint32_t i, uint32_t bytes,
                                             const PushUnit& unit) {
    std::byte* to = data + i * sizeof(PushUnit);
    if (is_whole(data, i, bytes)) return store_unit(to, unit);
    Element elements[kPushElements];
    memcpy(elements, &unit, sizeof(unit));
    PK_UNROLL
    for (int e = 0; e < kPushElements; ++e) {
      if (i * sizeof(PushUnit) + e * kSize < bytes) store_unit(to + e * kSize, elements[e]);
    }
  }
  // Reduces unit i of this round, in the order of the ranks. Returns false if the collective has
  // failed.
  PK_HOST_DEVICE bool reduce_pushed(std::byte* data, uint32_t i, uint32_t bytes) {
    using W = Wide<Type, PushUnit>;
    constexpr int kTerms = 32 / sizeof(PushUnit);  // Their words are loaded together.
    W total{};
    PK_ROLLED
    for (int first = 0; first < terms_; first += kTerms) {
      PushUnit units[kTerms];
      if (!collective_.wait_units(first, i, units)) return false;
      PK_UNROLL
      for (int t = 0; t < kTerms; ++t) {
        if (first + t >= terms_) break;
        const W term(first + t == me_ ? load_push_unit(data, i, bytes) : units[t]);
        if (first + t == 0) {
          total = term;
        } else {
          total.combine(term, reduction_);
        }
      }
    }
    store_push_unit(data, i, bytes, total.finish(reduction_, terms_));
    return true;
  }
};

template <Order order, class Type, class Team>
PK_HOST_DEVICE void one_shot_block(Team& team, const DeviceLaunch& launch) {
  run_all_reduce_block<OneShotBlock<order, Type, Team>>(team, launch);
}

}  // namespace pipekernels
