// The body of a thread block of all_reduce() in a ring.
#pragma once

#include <type_traits>

#include "pipekernels/collectives/all_reduce/block.cuh"
#include "pipekernels/collectives/ring_schedule.h"
#include "pipekernels/elements/tree_order.h"

namespace pipekernels {

// Knows both orders: partial results differ only in number.
template <class Type, class Team>
class RingBlock : public AllReduceBlock<Order::kRank, Type, Team> {
  using Base = AllReduceBlock<Order::kRank, Type, Team>;
  using Base::at, Base::chunks_, Base::kSize, Base::me_, Base::collective_, Base::reduction_;
  using Base::rounds_, Base::team_, Base::terms_;

 public:
  using Base::Base;

  // Partial results travel from rank 0 to the last rank. The result travels from there to rank 0
  // and on, up to the last rank but one. A rank writes into the mailboxes of the next rank.
  PK_HOST_DEVICE bool run() {
    collective_.signal();
    if (!collective_.wait()) return false;
    const int last = terms_ - 1;
    const int before = me_ == 0 ? last : me_ - 1, next = me_ == last ? 0 : me_ + 1;
    const uint64_t first = collective_.first_chunk();
    const auto reduce_step = [&](size_t k) {
      const ChunkRange chunk = chunks_(k);
      const uint64_t number = first + k;
      if (me_ != 0 && !collective_.wait_reduced(before, number)) return false;
      if (me_ == last) {
        finish(chunk, collective_.reduce_mailbox(me_, number),
               collective_.gather_mailbox(next, number));
        collective_.send_gathered(next, number);
      } else {
        accumulate(chunk, collective_.reduce_mailbox(me_, number),
                   collective_.reduce_mailbox(next, number));
        collective_.send_reduced(next, number);
      }
      return true;
    };
    const auto gather_step = [&](size_t k) {
      if (me_ == last) return true;
      const ChunkRange chunk = chunks_(k);
      const uint64_t number = first + k;
      if (!collective_.wait_gathered(before, number)) return false;
      const std::byte* arrived = collective_.gather_mailbox(me_, number);
      const bool passes_on = me_ != last - 1;
      PK_ROLLED
      for (int copy = 0; copy < 1 + passes_on; ++copy) {
        std::byte* to = copy == 0 ? at(chunk.begin) : collective_.gather_mailbox(next, number);
        copy_block(team_, to, arrived, chunk.count * kSize);
      }
      if (passes_on) collective_.send_gathered(next, number);
      return true;
    };
    const size_t lag = collective_.launch().ranks.layout.ring_depth() - 1;
    if (!ring_schedule(rounds_, lag, reduce_step, gather_step)) return false;
    collective_.finish_chunks(rounds_);
    collective_.signal();
    return collective_.wait();
  }

 private:
  using Element = typename Type::Element;
  using Accumulator = typename Type::Accumulator;

  // The distance in bytes between the partial results of an element.
  PK_HOST_DEVICE size_t partials_apart() const {
    return sizeof(Accumulator) * partial_stride(collective_.launch().ranks.layout.slot_bytes,
                                                most_partials(terms_, reduction_),
                                                sizeof(Accumulator));
  }
  // Where in a slot the partial results of the unit at `offset` of a chunk's elements begin.
  PK_HOST_DEVICE static size_t partials_at(size_t offset) {
    return offset / kSize * sizeof(Accumulator);
  }
  PK_HOST_DEVICE void accumulate(const ChunkRange& chunk, const std::byte* partials,
                                 std::byte* to) {
    const int kept = partials_after(me_ + 1, reduction_) - 1;
    const size_t apart = partials_apart();
    combine(chunk, partials, kept, [&](size_t offset, const auto& total) {
      using W = std::decay_t<decltype(total)>;
      size_t place = partials_at(offset);
      PK_ROLLED
      for (int p = 0; p < kept; ++p, place += apart) {
        W::load_partial(partials + place).store_partial(to + place);
      }
      total.store_partial(to + place);
    });
  }
  PK_HOST_DEVICE void finish(const ChunkRange& chunk, const std::byte* partials, std::byte* to) {
    std::byte* data = at(chunk.begin);
    combine(chunk, partials, 0, [&](size_t offset, const auto& total) {
      const auto unit = total.finish(reduction_, terms_);
      store_unit(data + offset, unit);
      store_unit(to + offset, unit);
    });
  }
  // Combines this rank's elements with the partial results from number `kept` on, and passes each
  // unit to store(offset, total).
  template <class Store>
  PK_HOST_DEVICE void combine(const ChunkRange& chunk, const std::byte* partials, int kept,
                              Store store) {
    const std::byte* data = at(chunk.begin);
    const size_t bytes = chunk.count * kSize, packs = is_aligned(data, data, 16) ? bytes / 16 : 0;
    constexpr int kPacks = kSize == 2 ? 2 : 3;  // Registers allow no more.
    combine_units<Pack, kPacks>(data, partials, kept, 0, packs, store);
    combine_units<Element, 2>(data, partials, kept, packs * 16 / kSize, chunk.count, store);
  }
  // The same for units [begin, end). A thread issues the loads of kUnits units, and of the partial
  // results that it combines with them first, before it uses one.
  template <class Unit, int kUnits, class Store>
  PK_HOST_DEVICE void combine_units(const std::byte* data, const std::byte* partials, int kept,
                                    uint32_t begin, uint32_t end, Store store) {
    using W = Wide<Type, Unit>;
    const int arrived = partials_after(me_, reduction_);
    const size_t apart = partials_apart();
    const uint32_t stride = team_.threads();
    PK_ROLLED
    for (uint32_t i = begin + team_.thread(); i < end; i += kUnits * stride) {
      const uint32_t left = end - i;
      const auto offset = [&](int u) { return size_t{sizeof(Unit)} * (i + u * stride); };
      Unit own[kUnits];
      W lower[kUnits], totals[kUnits];
      const auto load_lower = [&](int p) {
        const std::byte* place = partials + p * apart;
        PK_UNROLL
        for (int u = 0; u < kUnits; ++u) {
          if (u * stride < left) lower[u] = W::load_partial(place + partials_at(offset(u)));
        }
      };
      PK_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        if (u * stride < left) own[u] = load_unit<Unit>(data + offset(u));
      }
      if (arrived > kept) load_lower(arrived - 1);
      PK_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        if (u * stride < left) totals[u] = W(own[u]);
      }
      PK_ROLLED
      for (int p = arrived - 1; p >= kept; --p) {
        PK_UNROLL
        for (int u = 0; u < kUnits; ++u) {
          if (u * stride >= left) break;
          lower[u].combine(totals[u], reduction_);
          totals[u] = lower[u];
        }
        if (p > kept) load_lower(p - 1);
      }
      PK_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        if (u * stride < left) store(offset(u), totals[u]);
      }
    }
  }
};

template <class Type, class Team>
PK_HOST_DEVICE void ring_block(Team& team, const DeviceLaunch& launch) {
  run_all_reduce_block<RingBlock<Type, Team>>(team, launch);
}

}  // namespace pipekernels
