// One rank's end of a communicator, and the protocol that every collective is built from.
//
// Ranks are processes of one host, or threads of one process. A collective is a sequence of steps
// that all ranks take together: signal() publishes what this rank has written to shared memory,
// wait() returns once every peer has made as many signals as this rank. The first signal carries a
// descriptor of the call, and the first wait compares those of all ranks, so different calls end in
// a MismatchError on every rank, with all ranks still in step.
//
// A rank leaves a collective only when all ranks have made their last signal in it. So whoever
// still misses a signal of a rank that is gone will never get it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pipekernels/host/errors.h"
#include "pipekernels/host/isa.h"
#include "pipekernels/shared_memory/segment.h"
#include "pipekernels/shared_memory/symmetric_heap.h"

namespace pipekernels {

using Seconds = std::chrono::duration<double>;

class Communicator {
 public:
  // `pidfds`: if the ranks are processes, one per rank, -1 for this one; owned. Empty if the ranks
  // are threads of this process. `timeout` bounds every wait. `interrupt` is called now and then
  // while waiting, and may throw to give up. `before_wait` is called before a wait that may take
  // longer than some 10 us. `prefetch_writes`: see write_prefetch_pays() in isa.h. Throws
  // std::invalid_argument for a rank that the segment does not have, another number of `pidfds`, or
  // a timeout that is not in (0, 1e10].
  Communicator(
      std::shared_ptr<Segment> segment, int rank, std::vector<int> pidfds, Seconds timeout,
      std::function<void()> interrupt, std::function<void()> before_wait = [] {},
      bool prefetch_writes = write_prefetch_pays());
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  Seconds timeout() const { return timeout_; }
  bool is_threads() const { return pidfds_.empty(); }
  // Not after close().
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  const std::vector<int>& pidfds() const { return pidfds_; }
  // Of the segment's agreement.
  size_t one_shot_bytes() const { return one_shot_bytes_; }

  // Throws std::runtime_error if this communicator has been closed.
  std::shared_ptr<SymmetricHeap> heap() const;

  // Throws what keeps it from being used, if anything does.
  void check();
  // Ends it after a failure outside of shared memory, of which the peers hear.
  void fail_elsewhere(Reason reason, int culprit, const std::string& message);

  // Gives the shared memory back; from now on peers that need this rank get a PeerError. A call in
  // another thread fails, as does one that `interrupt` is called in; the memory is kept for the
  // latter until the next close() or the end of this object. Does nothing the second time.
  void close();
  // close() for a rank that gives up in the middle of its work.
  void abort();

 private:
  friend class Collective;

  // The error that has ended this communicator.
  struct Failure {
    Reason reason;
    int culprit;
    std::string message;
  };

  RankState& state(int rank) const { return segment_->state(rank); }

  void lock();
  void check_process() const;
  void check_usable() const;
  void await(Signal& signal, uint32_t target, int owner, int spins) const;
  void await_slowly(Signal& signal, uint32_t target, int owner) const;
  void interrupt() const;
  void await_arrivals(uint32_t target, int spins) const;
  void check_peers(const Signal& signal, uint32_t target) const;
  void check_processes(const Signal& signal, uint32_t target) const;
  [[noreturn]] void throw_timeout(const Signal& signal, uint32_t target, int owner) const;
  void publish(uint32_t status, uint64_t failed_call);
  void fail(Failure failure);
  void shut_down(uint32_t status);

  const int rank_;
  const int world_size_;
  const size_t one_shot_bytes_;
  const Seconds timeout_;
  const std::function<void()> interrupt_, before_wait_;
  const bool prefetch_writes_;
  const bool crowded_;      // Whether there are more ranks than cores.
  const unsigned process_;  // Tells a forked child from the process that made this object.
  std::atomic<bool> closed_{false};
  std::shared_ptr<SymmetricHeap> heap_;  // By std::atomic_load and std::atomic_store.

  std::timed_mutex mutex_;  // Held by each collective; guards all that follows.
  std::shared_ptr<Segment> segment_;
  std::vector<int> pidfds_;
  std::optional<Failure> failure_;
  Call call_{};          // The last one.
  uint64_t calls_ = 0;   // So far; the same on all ranks, as is the next.
  uint64_t rounds_ = 0;  // Of staging, so far.
  uint32_t chunks_ = 0;  // Of rings, so far.
};

// "30 s".
std::string format_seconds(Seconds duration);

// One collective in progress on this rank; holds the communicator.
class Collective {
 public:
  // `data`, of `bytes`: what peers may access in place, where they can.
  Collective(Communicator& communicator, const Call& call, const void* data, size_t bytes);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  int rank() const { return communicator_.rank_; }
  int world_size() const { return communicator_.world_size_; }
  Segment& segment() const { return *communicator_.segment_; }

  // The first one publishes what this rank calls.
  void signal();
  void wait();
  // Waits for a signal of `owner` alone.
  void wait(Signal& signal, uint32_t target, int owner);

  // Whether peers access this rank's data in place.
  bool direct() const { return mine_.location != 0; }
  // After the first wait: the data of `peer`, or null if it has to stage them.
  std::byte* data_of(int peer) const;
  // After the first wait: how many ranks have their data in place.
  int direct_ranks() const;

  // The staging buffer of `rank` for one round of this collective. Rounds are counted through all
  // collectives, so the call ends with finish_rounds(how many it had).
  std::byte* staging(int rank, uint64_t round) const {
    return segment().staging(rank, communicator_.rounds_ + round);
  }
  void finish_rounds(uint64_t count) { communicator_.rounds_ += count; }
  // After the last round: asks for the staging to which a next call copies so many bytes, and which
  // peers have read some rounds ago, if that pays; for as much as can be on its way without anyone
  // waiting.
  void take_staging(size_t bytes) const;

  // Likewise the chunks of a ring.
  uint32_t first_chunk() const { return communicator_.chunks_; }
  void finish_chunks(size_t count) { communicator_.chunks_ += static_cast<uint32_t>(count); }

  // Called when the collective has thrown the current exception: unless it is a mismatch, which all
  // ranks have seen, this rank cannot go on.
  void abandon();

 private:
  Descriptor& descriptor(int rank) const {
    return communicator_.state(rank).descriptors[communicator_.calls_ % 2];
  }
  void compare_descriptors();
  std::byte* address(uint64_t location) const;
  int spins() const;

  Communicator& communicator_;
  const size_t bytes_;
  Descriptor mine_;
  bool published_ = false;
  bool compared_ = false;
};

// Runs body(collective) as one collective.
template <class Body>
void run_collective(Communicator& communicator, const Call& call, const void* data, size_t bytes,
                    Body body) {
  Collective collective(communicator, call, data, bytes);
  try {
    body(collective);
  } catch (...) {
    collective.abandon();
    throw;
  }
}

// Returns when all ranks have called it.
void barrier(Communicator& communicator);

}  // namespace pipekernels
