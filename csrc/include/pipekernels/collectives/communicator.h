// One rank's end of a communicator, and the protocol on which every collective is built.
//
// Ranks are processes of one host, or threads of one process. A collective is a sequence of steps
// that all ranks take together: signal() publishes what this rank has written to shared memory,
// wait() returns once every peer has made as many signals as this rank. The first signal carries a
// descriptor of the call, and the first wait compares the descriptors of all ranks. If they differ,
// every rank throws a MismatchError, and all ranks stay in step.
//
// A rank leaves a collective only after all ranks have made their last signal in it. So if a rank
// has left the communicator and a signal of it is still missing, that signal will never come.
#pragma once

#include <algorithm>
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

#include "pipekernels/collectives/messages.h"
#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"
#include "pipekernels/host/errors.h"
#include "pipekernels/host/isa.h"
#include "pipekernels/host/parallel_for.h"
#include "pipekernels/shared_memory/segment.h"
#include "pipekernels/shared_memory/symmetric_heap.h"

namespace pipekernels {

// For error messages.
constexpr const char* kRuleForThreads =
    "each rank of Communicator.threads() calls from a thread of its own, all at the same time";

// How long a rank sleeps between checks for dead peers, the timeout and Ctrl-C.
constexpr std::chrono::milliseconds kPollInterval{20};
constexpr int kSpins =
    1000;  // Polls before a wait yields its core; see Communicator::await_briefly().

class Communicator {
 public:
  // `pidfds`: if the ranks are processes, one per rank, with -1 for this one; the communicator
  // closes them. Empty if the ranks are threads of this process. `timeout` bounds every wait.
  // `interrupt` is called every 20 ms during a wait, and may throw to end it. `before_wait` is
  // called before a wait that may take longer than some 10 us, `first_call` before the first
  // collective, which it may refuse by throwing. `threads`: on how many threads the caller's large
  // collectives may copy and add, see parallel_for(). `prefetch_writes`: see write_prefetch_pays()
  // in isa.h. Throws std::invalid_argument if `rank` is not a rank of the segment, the number of
  // `pidfds` is wrong, or `timeout` is not in (0, 1e10] seconds.
  Communicator(
      std::shared_ptr<Segment> segment, int rank, std::vector<int> pidfds, Seconds timeout,
      std::function<void()> interrupt, std::function<void()> before_wait = [] {},
      std::function<void()> first_call = [] {}, std::function<int()> threads = [] { return 1; },
      bool prefetch_writes = write_prefetch_pays());
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  Seconds timeout() const { return timeout_; }
  bool is_threads() const { return pidfds_.empty(); }
  // Null after close().
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  const std::vector<int>& pidfds() const { return pidfds_; }

  // Throws std::runtime_error if this communicator has been closed.
  std::shared_ptr<SymmetricHeap> heap() const;

  // Messages between this rank and others, apart from collectives.
  Messages& messages() { return *messages_; }

  // Throws if this communicator is closed, has failed, or was made by the parent process.
  void check();
  // Throws if this communicator was made by the parent process.
  void check_process() const;
  // Tells the peers that this rank is about to make its next collective, which it must then do
  // without waiting for anything else. Returns whether all peers have told the same within some
  // microseconds: if so, that collective does not depend on what else their programs do.
  bool meets_peers();
  // Marks this rank as failed after an error outside of its collectives on the CPU, and tells the
  // peers.
  void fail_externally(Reason reason, int culprit, const std::string& message);

  // Releases the shared memory. Peers that wait for this rank from now on throw a PeerError. A call
  // in progress in another thread fails. If `interrupt` calls close(), the interrupted call fails,
  // and the memory is released by the next close() or the destructor. Does nothing the second time.
  void close();
  // As close(), but tells the peers that this rank gave up after an error.
  void abort();

 private:
  friend class Collective;
  friend class Messages;

  // The error that has ended this communicator.
  struct Failure {
    Reason reason;
    int culprit;
    std::string message;
  };

  RankState& state(int rank) const { return segment_->state(rank); }

  void lock();
  void check_usable() const;
  bool await_briefly(const Signal& signal, uint32_t target, int spins) const;
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
  const Seconds timeout_;
  const std::function<void()> interrupt_, before_wait_, first_call_;
  const std::function<int()> threads_;
  const bool prefetch_writes_;
  const bool oversubscribed_;  // Whether there are more ranks than cores.
  const unsigned process_;     // The process_generation() of the process that made this object.
  std::atomic<bool> closed_{false};
  std::atomic<bool> failed_{
      false};  // Set after `failure_`, which then can be read without the lock.
  std::shared_ptr<SymmetricHeap> heap_;  // Accessed by std::atomic_load and std::atomic_store.

  std::timed_mutex mutex_;  // Held by each collective; guards the members below.
  std::shared_ptr<Segment> segment_;
  std::vector<int> pidfds_;
  std::optional<Failure> failure_;  // Set once.
  Call call_{};                     // The current or last call.
  uint64_t calls_ = 0;              // Calls so far; the same on all ranks, as is rounds_.
  uint64_t rounds_ = 0;             // Rounds of staging so far.
  uint32_t chunks_ = 0;             // Chunks of rings so far.

  std::unique_ptr<Messages> messages_;
};

// For error messages: "30 s".
std::string format_seconds(Seconds duration);

// One collective in progress on this rank; holds the communicator's lock.
class Collective {
 public:
  // Peers access the `bytes` at `data` in place if they can.
  Collective(Communicator& communicator, const Call& call, const void* data, size_t bytes);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  int rank() const { return communicator_.rank_; }
  int world_size() const { return communicator_.world_size_; }
  Segment& segment() const { return *communicator_.segment_; }

  // The first signal also publishes this rank's descriptor.
  void signal();
  void wait();
  // Waits until `signal`, raised by rank `owner`, has reached `target`.
  void wait(Signal& signal, uint32_t target, int owner);

  // Whether peers access this rank's data in place.
  bool direct() const { return mine_.location != 0; }
  // After the first wait: the data of `peer`, or null if it copies them through its staging.
  std::byte* data_of(int peer) const;
  // After the first wait: the number of ranks whose data are accessed in place.
  int direct_ranks() const;

  // The staging buffer of `rank` for round `round` of this collective. Rounds are counted through
  // all collectives, so every call ends with finish_rounds(number of its rounds).
  std::byte* staging(int rank, uint64_t round) const {
    return segment().staging(rank, communicator_.rounds_ + round);
  }
  void finish_rounds(uint64_t count) { communicator_.rounds_ += count; }
  // After finish_rounds(), if write prefetches pay: prefetches the beginning of the staging buffer
  // to which the next call will copy `bytes`, and which peers have read some rounds ago.
  void prefetch_staging(size_t bytes) const;

  // The chunks of rings are also counted through all collectives.
  uint32_t first_chunk() const { return communicator_.chunks_; }
  void finish_chunks(size_t count) { communicator_.chunks_ += static_cast<uint32_t>(count); }

  // Calls body(item, part, parts) for all parts of each of `items`, which have `bytes` each: on the
  // threads of this call, so it must not throw.
  template <class Body>
  void in_parts(int items, size_t bytes, Body body) const {
    if (items == 0) return;
    const int threads = std::min<size_t>((threads_ + items - 1) / items, bytes / kPartBytes);
    const int parts = std::max(1, threads);
    const auto run = [&](int64_t i) {
      body(static_cast<int>(i / parts), static_cast<int>(i % parts), parts);
    };
    if (threads_ > 1) return parallel_for(int64_t{items} * parts, threads_, run);
    for (int i = 0; i < items; ++i) run(i);
  }

  // in_parts() with body(peer, part, parts), for all ranks but this one.
  template <class Body>
  void in_parts_of_peers(size_t bytes, Body body) const {
    in_parts(world_size() - 1, bytes,
             [&](int i, int part, int parts) { body(i < rank() ? i : i + 1, part, parts); });
  }

  // copy_bytes() in parts.
  void copy(void* destination, const void* source, size_t bytes) const {
    in_parts(1, bytes, [&](int, int part, int parts) {
      const Range range = part_of({0, bytes}, part, parts);
      copy_bytes(static_cast<std::byte*>(destination) + range.begin,
                 static_cast<const std::byte*>(source) + range.begin, range.count);
    });
  }

  // Called in a catch block for an exception that the collective has thrown. Marks this rank as
  // failed, except for a MismatchError, which all ranks throw.
  void abandon();

 private:
  Descriptor& descriptor(int rank) const {
    return communicator_.state(rank).descriptors[communicator_.calls_ % 2];
  }
  void compare_descriptors();
  std::byte* address(uint64_t location) const;
  int spins() const;

  // A call of as many bytes takes longer than telling threads of it.
  static constexpr size_t kManyBytes = 256 << 10;
  static constexpr size_t kPartBytes = 16 << 10;  // The least for a thread.

  Communicator& communicator_;
  const size_t bytes_;
  const int threads_;
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

// A barrier of ranks that are about to make `call` by other means: ranks that make different calls
// throw a MismatchError.
void announce(Communicator& communicator, const Call& call);

}  // namespace pipekernels
