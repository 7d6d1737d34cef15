// How the threads of a block wait for what other ranks write, and how they fail, for a Team (see
// block_collective.h).
//
// A polling thread regularly checks whether a rank has failed, whether the host has asked it to
// stop, and whether the timeout has passed, so every wait ends. A rank that fails reports the
// reason to its host and to all peers, and its later kernels return at once. No kernel traps, so
// the CUDA context stays usable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

// The part of BlockCollective that waits.
template <class Team>
class DeviceWaits {
 protected:
  PK_HOST_DEVICE DeviceWaits(Team& team, const DeviceLaunch& launch)
      : team_(team), launch_(launch), ranks_(launch.ranks) {}

  PK_HOST_DEVICE Team& team() const { return team_; }
  PK_HOST_DEVICE const DeviceLaunch& launch() const { return launch_; }
  PK_HOST_DEVICE int rank() const { return ranks_.rank; }
  PK_HOST_DEVICE int ranks() const { return ranks_.layout.ranks; }

  PK_HOST_DEVICE std::byte* own_memory() const { return ranks_.memory[ranks_.rank]; }
  PK_HOST_DEVICE uint64_t& failed(std::byte* memory, int who) const {
    return ranks_.layout.control(memory).failed[who];
  }
  PK_HOST_DEVICE DeviceCell& own_cell(int writer) const {
    return ranks_.layout.cell(own_memory(), team_.block(), writer);
  }
  PK_HOST_DEVICE uint32_t flag() const { return static_cast<uint32_t>(counters_.pushes); }

  // Polls until *word, which rank `owner` raises, is at least `target`, and acquires what came
  // before. Returns false on a failure. Each acquire invalidates the cache, so polls are relaxed.
  PK_HOST_DEVICE bool await(const uint64_t* word, uint64_t target, int owner) {
    if (!poll([&] { return team_.load_relaxed(word) >= target; }, owner)) return false;
    team_.load_acquire(word);  // Counters only grow: it reads what was polled, or a later release.
    // An owner that has failed after its signal no longer preserves its data for this rank. A
    // mismatch is ignored here: either the owner has found it in a later call, or this rank finds
    // the same mismatch in compare().
    const uint64_t status = status_of(owner);
    return status == 0 || is_mismatch(status) || peer_failed(owner, status);
  }

  // Polls until reached(). Returns false on a failure. reached() may set `owner`, the rank that it
  // waits for.
  //
  // What could end the wait is looked for before every kSpins-th poll, and ends it only if that
  // poll fails: a rank fails after its last signal and its last pushes, so these have arrived by
  // then, and this thread may not have run for a long time. reached() stands here once, since
  // compilers inline it wherever it stands.
  template <class Reached>
  PK_HOST_DEVICE bool poll(const Reached& reached, const int& owner) {
    PollTimes times{};
    for (unsigned spins = 1;; ++spins) {
      const bool checks = spins % kSpins == 0;
      Interruption interruption;
      if (checks) {
        team_.pause();
        interruption = look_for_interruption(owner, times);
      }
      if (reached()) return true;
      if (checks && ends_wait(interruption, owner)) return false;
    }
  }

  // Whether `peer` makes the same call as this rank; reports a mismatch.
  PK_HOST_DEVICE bool matches(int peer, const Call& theirs) {
    if (same_call(theirs, launch_.descriptor.call)) return true;
    if (team_.block() == 0) report(mismatch(peer, theirs));
    return false;
  }
  PK_HOST_DEVICE DeviceFailure mismatch(int peer, const Call& theirs) const {
    return {DeviceFailureKind::kMismatch, peer, RankStatus::failed(Reason::kMismatched, peer),
            launch_.descriptor.call, theirs};
  }
  // Whether `peer` has pushed the call of the round with this flag, after as many calls with
  // signals as this rank has made; `call` is then that call.
  PK_HOST_DEVICE bool read_call(int peer, uint32_t flag, Call& call) const {
    const uint64_t* inbox = ranks_.layout.inbox(own_memory(), team_.block(), flag, peer);
    uint32_t data[kPushedCallWords];
    bool all = true;
    PK_UNROLL
    for (int i = 0; i < kPushedCallWords; ++i) {
      const uint64_t word = team_.load_relaxed(inbox + i);
      all = all && word >> 32 == flag;
      data[i] = static_cast<uint32_t>(word);
    }
    memcpy(&call, data, sizeof(call));
    return all && data[kPushedCallWords - 1] == static_cast<uint32_t>(counters_.calls);
  }

  // Reports a failure to the host, unless another thread of this rank has, and marks this rank as
  // failed for its own threads.
  PK_HOST_DEVICE void report(const DeviceFailure& failure) {
    if (team_.exchange(&ranks_.layout.control(own_memory()).reported, 1) == 0) {
      ranks_.host->failure = failure;
      team_.store_release(&ranks_.host->reported, 1);
    }
    // If the peer has closed, this rank itself has failed, not closed; name the peer as the reason.
    const bool closed = failure.status == RankStatus::kClosed;
    const uint32_t status =
        closed ? RankStatus::failed(Reason::kClosed, failure.rank) : failure.status;
    team_.store_release(&failed(own_memory(), rank()), status);
  }

  // Whether `success` is true for all threads of the block. If not, tells the peers that this rank
  // has failed. Only block 0 tells them of a mismatch, after all its threads have signalled.
  PK_HOST_DEVICE bool all_threads_succeeded(bool success) {
    if (!team_.any(!success)) return true;
    const uint64_t status = status_of(rank());
    if (status != 0 && (team_.block() == 0 || !is_mismatch(status))) {
      for (int peer = team_.thread(); peer < ranks(); peer += team_.threads()) {
        if (peer != rank()) team_.store_release(&failed(ranks_.memory[peer], rank()), status);
      }
    }
    // The peers are told before any thread overwrites data that they may be reading. The release
    // above does not order what follows it; csrc/model/ptx/protocols/preserved.litmus.
    team_.sync();
    team_.fence();
    return false;
  }

  Team& team_;
  const DeviceLaunch& launch_;
  const DeviceRanks& ranks_;
  DeviceCounters counters_{};  // Each thread's copy; finish() writes it back.
  bool compared_ = false;
  bool pushing_ = false;

 private:
  static constexpr unsigned kSpins = 64;            // Polls between two checks for failures.
  static constexpr uint64_t kHostInterval = 50000;  // Nanoseconds between reads of host memory.

  struct PollTimes {
    uint64_t start, host_checked;  // Nanoseconds; 0 until the first check.
  };
  enum class Cause : uint32_t { kNone, kOwnFailure, kPeerFailure, kStop, kTimeout };
  struct Interruption {
    Cause cause = Cause::kNone;
    int32_t rank = 0;     // The one that has failed, that is the reason to stop, or that is late.
    uint32_t status = 0;  // Of that rank.
    bool signalled = false;  // Whether this rank pushes, and the owner has signalled.
  };

  PK_HOST_DEVICE uint64_t status_of(int peer) const {
    return team_.load_acquire(&failed(own_memory(), peer));
  }

  PK_HOST_DEVICE Interruption look_for_interruption(int owner, PollTimes& times) {
    Interruption interruption = find_cause(owner, times);
    interruption.signalled =
        pushing_ && team_.load_acquire(&own_cell(owner).arrivals) > counters_.signals;
    return interruption;
  }
  PK_HOST_DEVICE Interruption find_cause(int owner, PollTimes& times) const {
    if (team_.load_relaxed(&failed(own_memory(), rank())) != 0) return {Cause::kOwnFailure};
    for (int peer = 0; peer < ranks(); ++peer) {
      const uint64_t status = status_of(peer);
      if (status != 0 && (peer == owner || !is_mismatch(status))) {
        return {Cause::kPeerFailure, peer, static_cast<uint32_t>(status)};
      }
    }
    const uint64_t now = team_.now();
    if (times.start == 0) times = {now, now};
    if (now > times.host_checked + kHostInterval) {
      times.host_checked = now;
      if (const uint64_t stop = team_.load_acquire(&ranks_.host->stop)) {
        return {Cause::kStop, static_cast<int32_t>(stop), static_cast<uint32_t>(stop >> 32)};
      }
    }
    // Clocks of multiprocessors may differ, so `now` may be before `start`.
    if (now < times.start || now - times.start <= ranks_.timeout) return {};
    return {Cause::kTimeout, owner, RankStatus::failed(Reason::kTimedOut, owner)};
  }

  // Whether a wait that is not over ends because of `interruption`, or because `owner` makes
  // another call; reports the reason then.
  PK_HOST_DEVICE bool ends_wait(const Interruption& interruption, int owner) {
    if (interruption.cause == Cause::kOwnFailure) return true;
    auto kind = DeviceFailureKind::kPeer;
    if (interruption.cause == Cause::kStop) kind = DeviceFailureKind::kStopped;
    if (interruption.cause == Cause::kTimeout) kind = DeviceFailureKind::kMissing;
    DeviceFailure failure{
        kind, interruption.rank, interruption.status, launch_.descriptor.call, {}};
    if (kind == DeviceFailureKind::kPeer &&
        calls_otherwise(owner, interruption.signalled, failure)) {
      if (team_.block() != 0) return true;
    } else if (interruption.cause == Cause::kNone) {
      return false;
    } else if (kind == DeviceFailureKind::kPeer && is_mismatch(interruption.status)) {
      return true;  // See peer_failed().
    }
    report(failure);
    return true;
  }

  // Whether `peer` makes another call than this rank, one that signals while this rank's pushes or
  // the reverse, so that this rank would wait in vain; `failure` is then that mismatch. Calls of
  // one kind are compared when they arrive.
  PK_HOST_DEVICE bool calls_otherwise(int peer, bool signalled, DeviceFailure& failure) const {
    Call theirs{};
    if (pushing_) {
      // If the signal was of a later call, the poll after it has found what was pushed in this one.
      if (!signalled) return false;
      theirs = own_cell(peer).calls[counters_.calls % 2].call;
    } else {
      const uint32_t next = flag() + 1;
      if (compared_ || next == 0 || !read_call(peer, next, theirs)) return false;
    }
    if (same_call(theirs, launch_.descriptor.call)) return false;
    failure = mismatch(peer, theirs);
    return true;
  }

  PK_HOST_DEVICE static bool is_mismatch(uint64_t status) {
    return RankStatus::is_failed(static_cast<uint32_t>(status)) &&
           RankStatus::reason(static_cast<uint32_t>(status)) == Reason::kMismatched;
  }

  // Reports the failure of `peer`; always returns false. A mismatch is not reported here: every
  // rank finds it in its own block 0. That block exists on all ranks and publishes the mismatch
  // only after it has signalled to all peers, so every rank can compare. The other blocks, whose
  // number may differ between ranks, return without a report.
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
};

}  // namespace pipekernels
