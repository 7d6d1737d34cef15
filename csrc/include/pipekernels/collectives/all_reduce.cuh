// The body of a thread block of all_reduce() on CUDA, for a Team (see device_meeting.h).
//
// The protocols are those of csrc/cpu/collectives/all_reduce.cpp and ring_schedule.h, which also
// show why two sets of inputs, three sets of results and kDeviceRingDepth slots suffice. Here they
// hold between the blocks of the same index on all ranks.
#pragma once

#include <type_traits>

#include "pipekernels/collectives/device_chunks.h"
#include "pipekernels/collectives/device_meeting.h"
#include "pipekernels/collectives/ring_schedule.h"
#include "pipekernels/elements/device_elements.h"
#include "pipekernels/elements/tree_order.h"

namespace pipekernels {

// One block's share of an all-reduce of this rank's tensor.
template <Order order, class Type, class Team>
class AllReduceBlock {
 public:
  static constexpr size_t kSize = sizeof(typename Type::Element);

  PK_HOST_DEVICE AllReduceBlock(Meeting<Team>& meeting)
      : meeting_(meeting),
        team_(meeting.team()),
        chunks_(meeting.launch(), team_.block()),
        rounds_(chunks_.rounds()),
        me_(meeting.rank()),
        terms_(meeting.ranks()),
        reduction_(meeting.launch().descriptor.call.reduction) {}

  // Every rank copies its tensor to its staging, and reduces the staged tensors of all ranks.
  PK_HOST_DEVICE bool one_shot() {
    for (size_t k = 0; k == 0 || k < rounds_; ++k) {
      const ChunkRange chunk = k < rounds_ ? chunks_(k) : ChunkRange{0, 0};
      copy_block(team_, meeting_.input(me_, k), at(chunk.begin), chunk.count * kSize);
      meeting_.signal();
      if (!meeting_.wait()) return false;
      set_sources(
          [&](int rank) { return rank == me_ ? at(chunk.begin) : meeting_.input(rank, k); });
      std::byte* data = at(chunk.begin);
      reduce(chunk, [&](size_t offset, auto unit) { store_unit(data + offset, unit); });
    }
    meeting_.finish_rounds(rounds_);
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
  PK_HOST_DEVICE bool pushed_one_shot() {
    for (size_t k = 0; k == 0 || k < rounds_; ++k) {
      const ChunkRange chunk = k < rounds_ ? chunks_(k) : ChunkRange{0, 0};
      const uint32_t bytes = static_cast<uint32_t>(chunk.count * kSize);
      const uint32_t units = (bytes + sizeof(PushUnit) - 1) / sizeof(PushUnit);
      std::byte* data = at(chunk.begin);
      if (!meeting_.begin_pushes()) return false;
      if (k == 0) meeting_.push_call();
      PK_ROLLED
      for (uint32_t i = team_.thread(); i < units; i += team_.threads()) {
        const PushUnit own = load_push_unit(data, i, bytes);
        int peer = me_;  // Another peer first on each rank.
        PK_ROLLED
        for (int step = 1; step < terms_; ++step) {
          peer = peer + 1 < terms_ ? peer + 1 : 0;
          meeting_.push_unit(peer, i, own);
        }
      }
      bool arrived = k > 0 || meeting_.wait_calls();
      PK_ROLLED
      for (uint32_t i = team_.thread(); i < units && arrived; i += team_.threads()) {
        arrived = reduce_pushed(data, i, bytes);
      }
      if (!meeting_.end_pushes(arrived)) return false;
    }
    return true;
  }

  // Every rank reduces its part of each chunk, and copies the parts that its peers have reduced.
  // Not inlined, its objects would lie in local memory; it is so long that compilers hesitate.
  PK_HOST_DEVICE PK_FORCE_INLINE bool two_shot() {
    if (!copy_in(0)) return false;
    meeting_.signal();
    if (!meeting_.wait()) return false;
    if (meeting_.direct_ranks() == terms_) return two_shot_in_place();
    for (size_t k = 0; k < rounds_; ++k) {
      reduce_part(k);
      if (!copy_in(k + 1)) return false;
      meeting_.signal();
      if (k > 0) gather(k - 1);
      if (!meeting_.wait()) return false;
    }
    if (rounds_ > 0) gather(rounds_ - 1);
    meeting_.finish_rounds(rounds_);
    return true;
  }

  // Partial results travel from rank 0 to the last rank. The result travels from there to rank 0
  // and on, up to the last rank but one. A rank writes into the mailboxes of the next rank.
  PK_HOST_DEVICE bool ring() {
    meeting_.signal();
    if (!meeting_.wait()) return false;
    const int last = terms_ - 1;
    const int before = me_ == 0 ? last : me_ - 1, next = me_ == last ? 0 : me_ + 1;
    const uint64_t first = meeting_.first_chunk();
    const auto reduce_step = [&](size_t k) {
      const ChunkRange chunk = chunks_(k);
      const uint64_t number = first + k;
      if (me_ != 0 && !meeting_.wait_reduced(before, number)) return false;
      if (me_ == last) {
        ring_finish(chunk, meeting_.reduce_mailbox(me_, number),
                    meeting_.gather_mailbox(next, number));
        meeting_.send_gathered(next, number);
      } else {
        ring_accumulate(chunk, meeting_.reduce_mailbox(me_, number),
                        meeting_.reduce_mailbox(next, number));
        meeting_.send_reduced(next, number);
      }
      return true;
    };
    const auto gather_step = [&](size_t k) {
      if (me_ == last) return true;
      const ChunkRange chunk = chunks_(k);
      const uint64_t number = first + k;
      if (!meeting_.wait_gathered(before, number)) return false;
      const std::byte* arrived = meeting_.gather_mailbox(me_, number);
      copy_block(team_, at(chunk.begin), arrived, chunk.count * kSize);
      if (me_ != last - 1) {
        copy_block(team_, meeting_.gather_mailbox(next, number), arrived, chunk.count * kSize);
        meeting_.send_gathered(next, number);
      }
      return true;
    };
    const size_t lag = terms_ < kDeviceRingDepth - 1 ? terms_ : kDeviceRingDepth - 1;
    if (!ring_schedule(rounds_, lag, reduce_step, gather_step)) return false;
    meeting_.finish_chunks(rounds_);
    meeting_.signal();
    return meeting_.wait();
  }

  // Overwrites this block's share of the output after a failure.
  PK_HOST_DEVICE void poison_output() {
    for (size_t k = 0; k < rounds_; ++k) {
      const ChunkRange chunk = chunks_(k);
      poison_block(team_, at(chunk.begin), chunk.count * kSize);
    }
  }

 private:
  PK_HOST_DEVICE std::byte* at(size_t element) const {
    return meeting_.launch().output + element * kSize;
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
      if (!meeting_.wait_units(first, i, units)) return false;
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

  // Sets source(rank), for each rank, as the sources of reduce().
  template <class Source>
  PK_HOST_DEVICE void set_sources(Source source) {
    team_.sync();  // The previous reduction has finished reading the sources.
    for (int rank = team_.thread(); rank < terms_; rank += team_.threads()) {
      team_.shared().source[rank] = source(rank);
    }
    team_.sync();
  }
  template <class Store>
  PK_HOST_DEVICE PK_FORCE_INLINE void reduce(const ChunkRange& range, Store store) {
    reduce_block<Type, order>(team_, team_.shared().source, terms_, range.count * kSize, reduction_,
                              nullptr, store);
  }

  // Waits until chunk k is complete, and stages the parts of it that peers reduce.
  PK_HOST_DEVICE PK_FORCE_INLINE bool copy_in(size_t k) {
    if (k >= rounds_) return true;
    const ChunkRange chunk = chunks_(k);
    if (!meeting_.wait_ready(chunk.begin, chunk.count)) return false;
    if (meeting_.direct()) return true;
    const ChunkRange own = part_of(chunk, me_, terms_, kSize);
    const size_t before = own.begin - chunk.begin, after = before + own.count;
    std::byte* staged = meeting_.input(me_, k);
    copy_block(team_, staged, at(chunk.begin), before * kSize);
    copy_block(team_, staged + after * kSize, at(chunk.begin + after),
               (chunk.count - after) * kSize);
    return true;
  }

  PK_HOST_DEVICE PK_FORCE_INLINE void reduce_part(size_t k) {
    const ChunkRange chunk = chunks_(k), own = part_of(chunk, me_, terms_, kSize);
    set_sources([&](int rank) -> const std::byte* {
      const std::byte* data = rank == me_ ? at(0) : meeting_.data_of(rank);
      return data ? data + own.begin * kSize
                  : meeting_.input(rank, k) + (own.begin - chunk.begin) * kSize;
    });
    std::byte* result = meeting_.result(me_, k);
    std::byte* data = at(own.begin);
    reduce(own, [&](size_t offset, auto unit) {
      store_unit(data + offset, unit);
      store_unit(result + offset, unit);
    });
  }

  PK_HOST_DEVICE PK_FORCE_INLINE void gather(size_t k) {
    const ChunkRange chunk = chunks_(k);
    for (int step = 1; step < terms_; ++step) {  // Starting with a different peer on each rank.
      const int rank = (me_ + step) % terms_;
      const ChunkRange part = part_of(chunk, rank, terms_, kSize);
      copy_block(team_, at(part.begin), meeting_.result(rank, k), part.count * kSize);
    }
  }

  // All ranks read and write each other's tensors in place. If the tensors are still being written
  // (see Gates), the ranks synchronise before each chunk.
  PK_HOST_DEVICE PK_FORCE_INLINE bool two_shot_in_place() {
    for (size_t k = 0; k < rounds_; ++k) {
      if (k > 0 && meeting_.launch().gates.ready != nullptr) {
        if (!copy_in(k)) return false;
        meeting_.signal();
        if (!meeting_.wait()) return false;
      }
      const ChunkRange own = part_of(chunks_(k), me_, terms_, kSize);
      const size_t begin = own.begin * kSize;
      set_sources([&](int rank) { return meeting_.data_of(rank) + begin; });
      reduce(own, [&](size_t offset, auto unit) {
        for (int rank = 0; rank < terms_; ++rank) {
          store_unit(meeting_.data_of(rank) + begin + offset, unit);
        }
      });
    }
    meeting_.signal();
    return meeting_.wait();
  }

  using Accumulator = typename Type::Accumulator;
  // The distance in bytes between the partial results of an element.
  PK_HOST_DEVICE size_t partials_apart() const {
    return sizeof(Accumulator) * partial_stride(meeting_.launch().ranks.layout.slot_bytes,
                                                most_partials(terms_, reduction_),
                                                sizeof(Accumulator));
  }
  // Where in a slot the partial results of the unit at `offset` of a chunk's elements begin.
  PK_HOST_DEVICE static size_t partials_at(size_t offset) {
    return offset / kSize * sizeof(Accumulator);
  }
  PK_HOST_DEVICE void ring_accumulate(const ChunkRange& chunk, const std::byte* partials,
                                      std::byte* to) {
    const int kept = partials_after(me_ + 1, reduction_) - 1;
    const size_t apart = partials_apart();
    ring_reduce(chunk, partials, kept, [&](size_t offset, const auto& total) {
      using W = std::decay_t<decltype(total)>;
      size_t place = partials_at(offset);
      PK_ROLLED
      for (int p = 0; p < kept; ++p, place += apart) {
        W::load_partial(partials + place).store_partial(to + place);
      }
      total.store_partial(to + place);
    });
  }
  PK_HOST_DEVICE void ring_finish(const ChunkRange& chunk, const std::byte* partials,
                                  std::byte* to) {
    std::byte* data = at(chunk.begin);
    ring_reduce(chunk, partials, 0, [&](size_t offset, const auto& total) {
      const auto unit = total.finish(reduction_, terms_);
      store_unit(data + offset, unit);
      store_unit(to + offset, unit);
    });
  }
  // Combines this rank's elements with the partial results from number `kept` on, and passes each
  // unit to store(offset, total).
  template <class Store>
  PK_HOST_DEVICE void ring_reduce(const ChunkRange& chunk, const std::byte* partials, int kept,
                                  Store store) {
    const std::byte* data = at(chunk.begin);
    const size_t bytes = chunk.count * kSize, packs = is_aligned(data, data, 16) ? bytes / 16 : 0;
    constexpr int kPacks = kSize == 2 ? 2 : 3;  // Registers allow no more.
    ring_units<Pack, kPacks>(data, partials, kept, 0, packs, store);
    ring_units<Element, 2>(data, partials, kept, packs * 16 / kSize, chunk.count, store);
  }
  // The same for units [begin, end). A thread issues the loads of kUnits units, and of the partial
  // results that it combines with them first, before it uses one.
  template <class Unit, int kUnits, class Store>
  PK_HOST_DEVICE void ring_units(const std::byte* data, const std::byte* partials, int kept,
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

  Meeting<Team>& meeting_;
  Team& team_;
  const Chunks chunks_;
  const size_t rounds_;
  const int me_, terms_;
  const Reduction reduction_;
};

// One block's share of an all-reduce of launch.count elements at launch.output, in place.
// `order` is that of kernel_order().
template <Algorithm algorithm, Order order, class Type, class Team>
PK_HOST_DEVICE void all_reduce_block(Team& team, const DeviceLaunch& launch) {
  Meeting<Team> meeting(team, launch);
  AllReduceBlock<order, Type, Team> block(meeting);
  bool done = meeting.begin();
  if constexpr (algorithm == Algorithm::kOneShot && order == Order::kRank) {
    done = done && (launch.pushed ? block.pushed_one_shot() : block.one_shot());
  } else if constexpr (algorithm == Algorithm::kOneShot) {
    done = done && block.one_shot();
  }
  if constexpr (algorithm == Algorithm::kTwoShot) done = done && block.two_shot();
  if constexpr (algorithm == Algorithm::kRing) done = done && block.ring();
  done ? meeting.finish() : block.poison_output();
}

// The algorithm that Algorithm::kAuto selects. A second step takes some 3 us, in which a link of
// 400 GB/s moves 1.2 MB. With one step a rank reads ranks - 1 tensors, with two steps the
// equivalent of 2 (ranks - 1) / ranks tensors. The limits are estimates, not measurements.
inline Algorithm choose_device_algorithm(size_t bytes, int ranks) {
  const size_t limit = ranks <= 2 ? 1 << 20 : ranks <= 4 ? 512 << 10 : 256 << 10;
  return bytes <= limit ? Algorithm::kOneShot : Algorithm::kTwoShot;
}

// The order of the kernel that runs `call`. The ring's knows both: partial results differ only in
// number.
inline Order kernel_order(const Call& call, Algorithm algorithm, int ranks) {
  return algorithm == Algorithm::kRing ? Order::kRank : order_of(call.reduction, ranks);
}

// The launch for `call`. `algorithm` must not be kAuto.
inline DeviceLaunch plan_all_reduce(const DeviceRanks& ranks, const Call& call, Algorithm algorithm,
                                    void* data, uint64_t location, const Gates& gates = {}) {
  const size_t size = size_of(call.dtype);
  size_t limit = ranks.layout.set_bytes;
  if (algorithm == Algorithm::kRing) {
    limit =
        partial_stride(ranks.layout.slot_bytes, most_partials(ranks.layout.ranks, call.reduction),
                       partial_size_of(call.dtype)) *
        size;
  }
  int blocks = ranks.layout.blocks;
  if (call.operation == Operation::kAllReduceWhenReady && static_cast<int>(call.root) < blocks) {
    blocks = static_cast<int>(call.root);
  }
  size_t least = ranks.layout.min_chunk_bytes;
  const bool pushed = algorithm == Algorithm::kOneShot &&
                      order_of(call.reduction, ranks.layout.ranks) == Order::kRank &&
                      call.count * size <= ranks.layout.push_limit;
  if (pushed) {
    limit = ranks.layout.inbox_bytes;
    least = limit / 4;  // One word for each thread.
  }
  const DeviceGrid grid = plan_grid(call.count, size, limit, least, blocks);
  auto* bytes = static_cast<std::byte*>(data);
  return {ranks,      {call, location}, bytes, bytes, call.count,
          grid.chunk, grid.blocks,      gates, pushed};
}

}  // namespace pipekernels
