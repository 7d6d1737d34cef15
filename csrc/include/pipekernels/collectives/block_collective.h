// The protocol of communicator.h on CUDA devices: how thread blocks of one index synchronise across
// ranks.
//
// The code is a template over a Team, which is one thread of a thread block: a CUDA thread, or in
// the tests a thread of the CPU. A Team has
//
//   thread(), threads(), block()   the indices of the thread and its block, the threads per block;
//   sync()                         a barrier of the block, after which all threads see each other's
//                                  writes;
//   any(bool)                      sync(), and whether the argument is true for any thread;
//   shared()                       the block's DeviceScratch, in shared memory;
//   load_acquire(p), load_relaxed(p), store_release(p, v), store_relaxed(p, v)
//                                  atomic accesses of system scope (all devices and hosts);
//   exchange(p, v)                 an atomic exchange of device scope;
//   fence()                        orders this thread's accesses before it and after it, for the
//                                  system;
//   now(), pause()                 a clock in nanoseconds, and a short sleep between polls.
//
// Memory ordering. All accesses of a block's threads before signal() happen before the release by
// one of them, since signal() first calls sync(). All accesses after wait() happen after the
// acquire by one of them, since wait() ends with a sync(). Causality order is transitive through
// synchronisation of different scopes, so plain accesses to the data suffice, also to the memory of
// other devices. csrc/model/ptx/protocols checks that under PTX's memory model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pipekernels/collectives/device_waits.h"
#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

// The shared memory of a thread block.
struct DeviceScratch {
  std::byte* data[kMaxDeviceRanks];          // Each rank's data, or null if they are staged.
  const std::byte* source[kMaxDeviceRanks];  // The sources of a reduction.
};

// One thread's part in a thread block's collective.
template <class Team>
class BlockCollective : public DeviceWaits<Team> {
  using Base = DeviceWaits<Team>;
  using Base::all_threads_succeeded, Base::await, Base::compared_, Base::counters_, Base::failed;
  using Base::flag, Base::launch_, Base::matches, Base::own_cell, Base::own_memory, Base::poll;
  using Base::pushing_, Base::ranks_, Base::read_call, Base::report, Base::team_;

 public:
  using Base::launch, Base::rank, Base::ranks, Base::team;

  PK_HOST_DEVICE BlockCollective(Team& team, const DeviceLaunch& launch) : Base(team, launch) {}

  // To be called first. Returns false, in all threads of the block, if this rank has failed in an
  // earlier collective, or if one still runs: streams order eager calls, but not the replays of
  // graphs in other streams.
  PK_HOST_DEVICE bool begin() {
    const bool failed_before = team_.load_relaxed(&failed(own_memory(), rank())) != 0;
    const bool overlaps = team_.thread() == team_.threads() - 1 &&
                          team_.exchange(&state().busy, 1) != 0 && !failed_before;
    if (overlaps) {
      report({DeviceFailureKind::kOverlap,
              rank(),
              RankStatus::failed(Reason::kAborted, rank()),
              launch_.descriptor.call,
              {}});
    }
    if (!all_threads_succeeded(!failed_before && !overlaps)) return false;
    counters_ = state().counters;
    return true;
  }

  // Tells the peers that this block has reached this step. The first signal also publishes the
  // descriptor.
  PK_HOST_DEVICE void signal() {
    team_.sync();
    ++counters_.signals;
    for (int peer = team_.thread(); peer < ranks(); peer += team_.threads()) {
      if (peer == rank()) continue;
      DeviceCell& cell = ranks_.layout.cell(ranks_.memory[peer], team_.block(), rank());
      // Overwrites the descriptor of the call before last. The peer compared that one before its
      // first signal in the last call, for which this rank has waited.
      if (!published_) cell.calls[counters_.calls % 2] = launch_.descriptor;
      team_.store_release(&cell.arrivals, counters_.signals);
    }
    published_ = true;
  }

  // Waits until every peer has made as many signals as this block. The first wait also compares the
  // descriptors. Returns false, in all threads of the block, if the collective has failed.
  PK_HOST_DEVICE bool wait() {
    bool arrived = true;
    for (int peer = team_.thread(); peer < ranks() && arrived; peer += team_.threads()) {
      if (peer == rank()) {
        record_data(peer, launch_.descriptor);
        continue;
      }
      const DeviceCell& cell = own_cell(peer);
      arrived =
          await(&cell.arrivals, counters_.signals, peer) && (compared_ || compare(peer, cell));
    }
    compared_ = true;
    return all_threads_succeeded(arrived);
  }

  // Begins a round of pushed words (OneShotBlock::pushed()): 4 bytes of data below 4 of flag, the
  // round's number. Returns false, in all threads, if the collective has failed. A flag is never
  // one that the inboxes have held: when their numbers are used up, after 2^32 - 1 rounds, the
  // ranks synchronise, clear the inboxes, and synchronise again.
  PK_HOST_DEVICE bool begin_pushes() {
    pushing_ = true;
    ++counters_.pushes;
    if (flag() != 0) return true;
    PK_ROLLED
    for (int step = 0; step < 2; ++step) {
      if (step == 1) clear_inboxes();
      signal();
      if (!wait()) return false;
    }
    ++counters_.pushes;
    return true;
  }

  // Pushes this rank's call to all peers; to be called in the first round.
  PK_HOST_DEVICE void push_call() {
    uint32_t words[kPushedCallWords];
    memcpy(words, &launch_.descriptor.call, sizeof(Call));
    words[kPushedCallWords - 1] = static_cast<uint32_t>(counters_.calls);
    for (int peer = from_last_thread(); peer < ranks(); peer += team_.threads()) {
      if (peer == rank()) continue;
      PK_UNROLL
      for (int i = 0; i < kPushedCallWords; ++i) push(peer, i, words[i]);
    }
  }
  // Waits for the calls of all peers and compares them with this rank's. Returns false, in some
  // threads, if the collective has failed.
  PK_HOST_DEVICE bool wait_calls() {
    bool same = true;
    for (int peer = from_last_thread(); peer < ranks() && same; peer += team_.threads()) {
      Call theirs{};
      same = peer == rank() ||
             (poll([&] { return read_call(peer, flag(), theirs); }, peer) && matches(peer, theirs));
    }
    return same;
  }

  // Pushes unit `i` of this round's data, of 4 or 8 bytes.
  template <class Unit>
  PK_HOST_DEVICE void push_unit(int peer, uint32_t i, const Unit& unit) {
    constexpr int kWords = sizeof(Unit) / 4;
    uint32_t words[kWords];
    memcpy(words, &unit, sizeof(unit));
    PK_UNROLL
    for (int w = 0; w < kWords; ++w) push(peer, kPushedCallWords + i * kWords + w, words[w]);
  }
  // Waits for unit `i` of ranks `first`, ..., `first + kRanks - 1`, as far as these exist and are
  // peers. Returns false if the collective has failed.
  template <int kRanks, class Unit>
  PK_HOST_DEVICE bool wait_units(int first, uint32_t i, Unit (&units)[kRanks]) {
    constexpr int kWords = sizeof(Unit) / 4;
    const size_t stride = ranks_.layout.inbox_words();
    const uint64_t* from =
        ranks_.layout.inbox(own_memory(), team_.block(), counters_.pushes, first) +
        kPushedCallWords + i * kWords;
    int missing = first;
    const auto arrived = [&] {
      uint64_t words[kRanks][kWords];
      PK_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        PK_UNROLL
        for (int w = 0; w < kWords; ++w) {
          words[r][w] = static_cast<uint64_t>(flag()) << 32;
          if (first + r < ranks() && first + r != rank()) {
            words[r][w] = team_.load_relaxed(from + r * stride + w);
          }
        }
      }
      bool all = true;
      PK_UNROLL
      for (int r = kRanks - 1; r >= 0; --r) {
        uint32_t data[kWords];
        PK_UNROLL
        for (int w = 0; w < kWords; ++w) {
          data[w] = static_cast<uint32_t>(words[r][w]);
          if (words[r][w] >> 32 == flag()) continue;
          all = false;
          missing = first + r;
        }
        memcpy(&units[r], data, sizeof(Unit));
      }
      return all;
    };
    return poll(arrived, missing);
  }
  // Ends a round; `arrived`: what the waits of this thread have returned. Returns as wait() does.
  PK_HOST_DEVICE bool end_pushes(bool arrived) { return all_threads_succeeded(arrived); }

  // Waits until rank `before` has put chunk `number` into this rank's mailbox.
  PK_HOST_DEVICE bool wait_reduced(int before, uint64_t number) {
    return wait_chunk(&own_cell(before).reduce_sent, before, number);
  }
  PK_HOST_DEVICE bool wait_gathered(int before, uint64_t number) {
    return wait_chunk(&own_cell(before).gather_sent, before, number);
  }
  // Tells rank `next` that chunk `number` is in its mailbox.
  PK_HOST_DEVICE void send_reduced(int next, uint64_t number) {
    send_chunk(&peer_cell(next).reduce_sent, number);
  }
  PK_HOST_DEVICE void send_gathered(int next, uint64_t number) {
    send_chunk(&peer_cell(next).gather_sent, number);
  }

  // Whether peers access this rank's data in place. After the first wait: the data of `peer`, or
  // null if it copies them through its staging, and the number of ranks whose data are in place.
  PK_HOST_DEVICE bool direct() const { return launch_.descriptor.location != 0; }
  PK_HOST_DEVICE std::byte* data_of(int peer) const { return team_.shared().data[peer]; }
  PK_HOST_DEVICE int direct_ranks() const {
    int count = 0;
    for (int peer = 0; peer < ranks(); ++peer) count += data_of(peer) != nullptr;
    return count;
  }

  // The staging buffers of `peer` for round `round` of this collective.
  PK_HOST_DEVICE std::byte* input(int peer, uint64_t round) const {
    return ranks_.layout.input(ranks_.memory[peer], team_.block(), counters_.rounds + round);
  }
  PK_HOST_DEVICE std::byte* result(int peer, uint64_t round) const {
    return ranks_.layout.result(ranks_.memory[peer], team_.block(), counters_.rounds + round);
  }
  PK_HOST_DEVICE std::byte* reduce_mailbox(int peer, uint64_t number) const {
    return ranks_.layout.reduce_mailbox(ranks_.memory[peer], team_.block(), number);
  }
  PK_HOST_DEVICE std::byte* gather_mailbox(int peer, uint64_t number) const {
    return ranks_.layout.gather_mailbox(ranks_.memory[peer], team_.block(), number);
  }
  PK_HOST_DEVICE void finish_rounds(uint64_t count) { counters_.rounds += count; }
  PK_HOST_DEVICE uint64_t first_chunk() const { return counters_.chunks; }
  PK_HOST_DEVICE void finish_chunks(uint64_t count) { counters_.chunks += count; }

  // Called at the end of a collective that has not failed.
  PK_HOST_DEVICE void finish() {
    if (published_) ++counters_.calls;
    team_.sync();
    if (team_.thread() != 0) return;
    state().counters = counters_;
    team_.exchange(&state().busy, 0);
  }

 private:
  PK_HOST_DEVICE DeviceBlockState& state() const {
    return ranks_.layout.state(own_memory(), team_.block());
  }
  PK_HOST_DEVICE DeviceCell& peer_cell(int peer) const {
    return ranks_.layout.cell(ranks_.memory[peer], team_.block(), rank());
  }

  PK_HOST_DEVICE bool wait_chunk(const uint64_t* sent, int before, uint64_t number) {
    return all_threads_succeeded(team_.thread() != 0 || await(sent, number + 1, before));
  }
  PK_HOST_DEVICE void send_chunk(uint64_t* sent, uint64_t number) {
    team_.sync();
    if (team_.thread() == 0) team_.store_release(sent, number + 1);
  }

  PK_HOST_DEVICE void record_data(int peer, const Descriptor& descriptor) {
    if (compared_) return;
    team_.shared().data[peer] =
        descriptor.location == 0 ? nullptr : ranks_.at(peer, descriptor.location);
  }

  PK_HOST_DEVICE bool compare(int peer, const DeviceCell& cell) {
    const Descriptor& theirs = cell.calls[counters_.calls % 2];
    if (!matches(peer, theirs.call)) return false;
    record_data(peer, theirs);
    return true;
  }
  PK_HOST_DEVICE void clear_inboxes() const {
    uint64_t* words = ranks_.layout.inbox(own_memory(), team_.block(), 0, 0);
    const size_t count = kInboxes * ranks() * ranks_.layout.inbox_words();
    for (size_t i = team_.thread(); i < count; i += team_.threads()) {
      team_.store_relaxed(words + i, 0);
    }
  }
  PK_HOST_DEVICE void push(int peer, uint32_t index, uint32_t data) {
    uint64_t* inbox =
        ranks_.layout.inbox(ranks_.memory[peer], team_.block(), counters_.pushes, rank());
    team_.store_relaxed(inbox + index, static_cast<uint64_t>(flag()) << 32 | data);
  }
  // The first threads already have data to push and to wait for.
  PK_HOST_DEVICE int from_last_thread() const { return team_.threads() - 1 - team_.thread(); }

  bool published_ = false;
};

}  // namespace pipekernels
