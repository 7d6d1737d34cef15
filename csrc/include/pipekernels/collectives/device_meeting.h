// How the blocks of one number meet: the protocol of communicator.h on CUDA devices.
//
// Everything is written for a Team, one thread of a thread block: a CUDA thread, or in the tests a
// thread of the CPU. A Team has
//
//   thread(), threads(), block()   its place;
//   sync()                         all threads of the block arrive, and see what any has written;
//   any(bool)                      likewise, and whether it is true for one of them;
//   shared()                       a DeviceScratch that the block has in common;
//   load_acquire(p), load_relaxed(p), store_release(p, v), store_relaxed(p, v), exchange(p, v)
//                                  atomic accesses, in the order of a whole system with all its
//                                  devices and hosts;
//   now(), pause()                 a clock in nanoseconds, and a moment of rest while polling.
//
// Order of memory. What the threads of a block write, or read, before signal() comes before the
// release by one of them, since the sync() in signal() lies between; what they do after wait()
// comes after the acquire by one of them, likewise. Causality goes through such chains whatever the
// scopes of their links, so plain accesses to the data suffice, to memory of other devices too.
//
// Who polls looks now and then whether a rank has failed, whether the host wants it to stop, and at
// the clock; so every wait ends. A rank that fails reports why to its host
// and tells all peers, later kernels leave at once, and nothing traps: the context stays usable.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

// Shared memory of a thread block.
struct DeviceScratch {
  std::byte* data[kMaxDeviceRanks];          // Of each rank in place, or null.
  const std::byte* source[kMaxDeviceRanks];  // Of a reduction.
};

// One thread's part in one collective.
template <class Team>
class Meeting {
 public:
  PK_HOST_DEVICE Meeting(Team& team, const DeviceLaunch& launch)
      : team_(team),
        launch_(launch),
        ranks_(launch.ranks),
        state_(ranks_.layout.state(own_memory(), team.block())) {}

  PK_HOST_DEVICE Team& team() const { return team_; }
  PK_HOST_DEVICE const DeviceLaunch& launch() const { return launch_; }
  PK_HOST_DEVICE int rank() const { return ranks_.rank; }
  PK_HOST_DEVICE int ranks() const { return ranks_.layout.ranks; }

  // Whether the rank has not failed before. The same for all threads of the block.
  PK_HOST_DEVICE bool usable() const {
    return !team_.any(team_.load_relaxed(&failed(own_memory(), rank())) != 0);
  }

  // Says that this block has done its part; the first time also what it calls.
  PK_HOST_DEVICE void signal() {
    team_.sync();
    ++state_.signals;
    for (int peer = team_.thread(); peer < ranks(); peer += team_.threads()) {
      if (peer == rank()) continue;
      DeviceCell& cell = ranks_.layout.cell(ranks_.memory[peer], team_.block(), rank());
      // Replaces what we called in the call before last. The peer compared that before its first
      // signal in the last call, for which we have waited.
      if (!published_) cell.calls[state_.calls % 2] = launch_.descriptor;
      team_.store_release(&cell.arrivals, state_.signals);
    }
    published_ = true;
  }

  // Waits for as many signals of every peer; the first time compares what they call. If it returns
  // false, which it does for all threads of the block, the collective has failed.
  PK_HOST_DEVICE bool wait() {
    bool arrived = true;
    for (int peer = team_.thread(); peer < ranks() && arrived; peer += team_.threads()) {
      if (peer == rank()) {
        note_data(peer, launch_.descriptor);
        continue;
      }
      const DeviceCell& cell = own_cell(peer);
      arrived = await(&cell.arrivals, state_.signals, peer) && (compared_ || compare(peer, cell));
    }
    compared_ = true;
    return agree(arrived);
  }

  // Waits until the rank before has put chunk `number` into a mailbox of this one.
  PK_HOST_DEVICE bool wait_reduced(int before, uint64_t number) {
    return wait_chunk(&own_cell(before).reduce_sent, before, number);
  }
  PK_HOST_DEVICE bool wait_gathered(int before, uint64_t number) {
    return wait_chunk(&own_cell(before).gather_sent, before, number);
  }
  // Tells the next rank that chunk `number` is in its mailbox.
  PK_HOST_DEVICE void send_reduced(int next, uint64_t number) {
    send_chunk(&peer_cell(next).reduce_sent, number);
  }
  PK_HOST_DEVICE void send_gathered(int next, uint64_t number) {
    send_chunk(&peer_cell(next).gather_sent, number);
  }

  // Waits until the elements from `begin` on are complete; false as in wait().
  PK_HOST_DEVICE bool wait_ready(size_t begin, size_t count) {
    const Gates& gates = launch_.gates;
    if (gates.ready == nullptr || count == 0) return true;
    const size_t last = (begin + count - 1) / gates.block_elements;
    bool ready = true;
    for (size_t i = begin / gates.block_elements + team_.thread(); i <= last && ready;
         i += team_.threads()) {
      ready = poll([&] { return team_.load_acquire(gates.ready + i) >= gates.target; }, rank());
    }
    return agree(ready);
  }

  // After the first wait: whether peers access this rank's data in place, and its address for those
  // of `peer`, or null.
  PK_HOST_DEVICE bool direct() const { return launch_.descriptor.location != 0; }
  PK_HOST_DEVICE std::byte* data_of(int peer) const { return team_.shared().data[peer]; }
  PK_HOST_DEVICE int direct_ranks() const {
    int count = 0;
    for (int peer = 0; peer < ranks(); ++peer) count += data_of(peer) != nullptr;
    return count;
  }

  // The staging of `peer` for one round of this collective.
  PK_HOST_DEVICE std::byte* input(int peer, uint64_t round) const {
    return ranks_.layout.input(ranks_.memory[peer], team_.block(), state_.rounds + round);
  }
  PK_HOST_DEVICE std::byte* result(int peer, uint64_t round) const {
    return ranks_.layout.result(ranks_.memory[peer], team_.block(), state_.rounds + round);
  }
  PK_HOST_DEVICE std::byte* reduce_mailbox(int peer, uint64_t number) const {
    return ranks_.layout.reduce_mailbox(ranks_.memory[peer], team_.block(), number);
  }
  PK_HOST_DEVICE std::byte* gather_mailbox(int peer, uint64_t number) const {
    return ranks_.layout.gather_mailbox(ranks_.memory[peer], team_.block(), number);
  }
  PK_HOST_DEVICE void finish_rounds(uint64_t count) { state_.rounds += count; }
  PK_HOST_DEVICE uint64_t first_chunk() const { return state_.chunks; }
  PK_HOST_DEVICE void finish_chunks(uint64_t count) { state_.chunks += count; }

  // At the end of a collective that has not failed.
  PK_HOST_DEVICE void finish() {
    ++state_.calls;
    if (team_.thread() == 0) ranks_.layout.state(own_memory(), team_.block()) = state_;
  }

 private:
  static constexpr unsigned kSpins = 64;            // Between two looks around.
  static constexpr uint64_t kHostInterval = 50000;  // Nanoseconds between two looks at host memory.

  PK_HOST_DEVICE std::byte* own_memory() const { return ranks_.memory[ranks_.rank]; }
  PK_HOST_DEVICE uint64_t& failed(std::byte* memory, int who) const {
    return ranks_.layout.control(memory).failed[who];
  }
  PK_HOST_DEVICE DeviceCell& own_cell(int writer) const {
    return ranks_.layout.cell(own_memory(), team_.block(), writer);
  }
  PK_HOST_DEVICE DeviceCell& peer_cell(int peer) const {
    return ranks_.layout.cell(ranks_.memory[peer], team_.block(), rank());
  }

  PK_HOST_DEVICE bool wait_chunk(const uint64_t* sent, int before, uint64_t number) {
    return agree(team_.thread() != 0 || await(sent, number + 1, before));
  }
  PK_HOST_DEVICE void send_chunk(uint64_t* sent, uint64_t number) {
    team_.sync();
    if (team_.thread() == 0) team_.store_release(sent, number + 1);
  }

  PK_HOST_DEVICE void note_data(int peer, const Descriptor& descriptor) {
    if (compared_) return;
    team_.shared().data[peer] =
        descriptor.location == 0 ? nullptr : ranks_.memory[peer] + descriptor.location;
  }

  PK_HOST_DEVICE bool compare(int peer, const DeviceCell& cell) {
    const Descriptor& theirs = cell.calls[state_.calls % 2];
    if (!same(theirs.call, launch_.descriptor.call)) {
      if (team_.block() == 0) {
        report({DeviceFailureKind::kMismatch, peer, RankStatus::failed(Reason::kMismatched, peer),
                launch_.descriptor.call, theirs.call});
      }
      return false;
    }
    note_data(peer, theirs);
    return true;
  }

  PK_HOST_DEVICE bool await(const uint64_t* word, uint64_t target, int owner) {
    const auto reached = [&] { return team_.load_acquire(word) >= target; };
    if (!poll(reached, owner)) return false;
    // One that has failed since no longer keeps its data for us. If it has found different calls,
    // then not in this one, of which it has passed the first wait, or we find them ourselves.
    const uint64_t status = status_of(owner);
    return status == 0 || is_mismatch(status) || peer_failed(owner, status);
  }

  // Polls until reached(), which `owner` brings about.
  template <class Reached>
  PK_HOST_DEVICE bool poll(const Reached& reached, int owner) {
    Patience patience{};
    for (unsigned spins = 1;; ++spins) {
      if (reached()) return true;
      if (spins % kSpins != 0) continue;
      team_.pause();
      const int failed_rank = look_around(reached, owner, patience);
      if (failed_rank == kGoOn) continue;
      if (failed_rank == kGiveUp) return false;
      // A rank fails after its last signal: what has been read before may be older than that.
      return reached() || peer_failed(failed_rank, status_of(failed_rank));
    }
  }

  struct Patience {
    uint64_t start, looked;
  };
  static constexpr int kGoOn = -1, kGiveUp = -2;

  PK_HOST_DEVICE uint64_t status_of(int peer) const {
    return team_.load_acquire(&failed(own_memory(), peer));
  }

  // Returns the rank of a peer that has failed, or one of the above. Reports what it finds else,
  // after a last look: this thread may have been away from the device for long.
  template <class Reached>
  PK_HOST_DEVICE int look_around(const Reached& reached, int owner, Patience& patience) {
    if (team_.load_relaxed(&failed(own_memory(), rank())) != 0) return kGiveUp;
    for (int peer = 0; peer < ranks(); ++peer) {
      const uint64_t status = status_of(peer);
      if (status != 0 && (peer == owner || !is_mismatch(status))) return peer;
    }
    const uint64_t now = team_.now();
    if (patience.start == 0) patience = {now, now};
    if (now > patience.looked + kHostInterval) {
      patience.looked = now;
      if (const uint64_t stop = team_.load_acquire(&ranks_.host->stop)) {
        if (reached()) return kGoOn;
        report({DeviceFailureKind::kStopped,
                static_cast<int32_t>(stop),
                static_cast<uint32_t>(stop >> 32),
                launch_.descriptor.call,
                {}});
        return kGiveUp;
      }
    }
    // Multiprocessors' clocks may differ: one that is behind is not late.
    if (now < patience.start || now - patience.start <= ranks_.timeout || reached()) return kGoOn;
    const auto kind = owner == rank() ? DeviceFailureKind::kNotReady : DeviceFailureKind::kMissing;
    report(
        {kind, owner, RankStatus::failed(Reason::kTimedOut, owner), launch_.descriptor.call, {}});
    return kGiveUp;
  }

  PK_HOST_DEVICE static bool is_mismatch(uint64_t status) {
    return RankStatus::is_failed(static_cast<uint32_t>(status)) &&
           RankStatus::reason(static_cast<uint32_t>(status)) == Reason::kMismatched;
  }

  // Always false. Where ranks call different things, each finds that out in its block 0, which all
  // of them have: none says so before that block has signalled to all, so none can miss it. Their
  // other blocks, of which some may have more, leave quietly.
  PK_HOST_DEVICE bool peer_failed(int peer, uint64_t status) {
    if (!is_mismatch(status)) {
      report({DeviceFailureKind::kPeer,
              peer,
              static_cast<uint32_t>(status),
              launch_.descriptor.call,
              {}});
    }
    return false;
  }

  // Tells the host, unless another block or thread has, and the threads of this rank.
  PK_HOST_DEVICE void report(const DeviceFailure& failure) {
    if (team_.exchange(&ranks_.layout.control(own_memory()).reported, 1) == 0) {
      ranks_.host->failure = failure;
      team_.store_release(&ranks_.host->reported, 1);
    }
    // What this rank's failure means for others. If the host has stopped it because a peer has
    // closed or died, then that.
    const bool closed = failure.status == RankStatus::kClosed;
    const uint32_t status =
        closed ? RankStatus::failed(Reason::kClosed, failure.rank) : failure.status;
    team_.store_release(&failed(own_memory(), rank()), status);
  }

  // Whether `good` holds for all threads. If not, tells the peers that this rank has failed; of
  // different calls, block 0 tells, whose threads have all sent their signals by then.
  PK_HOST_DEVICE bool agree(bool good) {
    if (!team_.any(!good)) return true;
    const uint64_t status = status_of(rank());
    if (status != 0 && (team_.block() == 0 || !is_mismatch(status))) {
      for (int peer = team_.thread(); peer < ranks(); peer += team_.threads()) {
        if (peer != rank()) team_.store_release(&failed(ranks_.memory[peer], rank()), status);
      }
    }
    team_.sync();  // Only then may this rank change what peers still read.
    return false;
  }

  Team& team_;
  const DeviceLaunch& launch_;
  const DeviceRanks& ranks_;
  DeviceBlockState state_;  // A copy, kept by every thread.
  bool published_ = false;
  bool compared_ = false;
};

}  // namespace pipekernels
