#include "pipekernels/collectives/communicator.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "pipekernels/shared_memory/process.h"

namespace pipekernels {
namespace {

using Clock = std::chrono::steady_clock;

// How often a rank polls a signal before it sleeps: first in a tight loop, then yielding its core
// between polls. Ranks that share cores only yield, since the awaited peer may need this very core.
// A rank with its own core should not yield while its peers work in the same collective, which
// takes some 10 us at most: another process could take the core for milliseconds.
constexpr int kSpinsFirst = 200;  // In the first wait of a collective, kSpins in later waits.
constexpr int kYields = 200;
// How long meets_peers() looks for its peers: less than what it takes a thread to wake and return.
constexpr std::chrono::microseconds kLook{20};

constexpr double kMaxTimeout = 1e10;  // Seconds; as nanoseconds they fit into 64 bits.

// The communicators whose interrupt_() this thread is calling, innermost first. There are several
// if a signal handler calls a collective in turn.
struct InterruptCheck {
  const Communicator* communicator;
  const InterruptCheck* outer;
};
thread_local const InterruptCheck* innermost_check = nullptr;

int check_rank(int rank, int world_size) {
  if (rank >= 0 && rank < world_size) return rank;
  throw std::invalid_argument("rank must be in 0.." + std::to_string(world_size - 1) + ", got " +
                              std::to_string(rank));
}

bool is_checking_interrupts(const Communicator* communicator) {
  const InterruptCheck* check = innermost_check;
  while (check && check->communicator != communicator) check = check->outer;
  return check != nullptr;
}

}  // namespace

std::string format_seconds(Seconds duration) {
  std::string text = std::to_string(duration.count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// ---- construction and shutdown ----------------------------------------------------------------

Communicator::Communicator(std::shared_ptr<Segment> segment, int rank, std::vector<int> pidfds,
                           Seconds timeout, std::function<void()> interrupt,
                           std::function<void()> before_wait, std::function<void()> first_call,
                           std::function<int()> threads, bool prefetch_writes)
    : rank_(check_rank(rank, segment->world_size())),
      world_size_(segment->world_size()),
      timeout_(timeout),
      interrupt_(std::move(interrupt)),
      before_wait_(std::move(before_wait)),
      first_call_(std::move(first_call)),
      threads_(std::move(threads)),
      prefetch_writes_(prefetch_writes),
      oversubscribed_(sysconf(_SC_NPROCESSORS_ONLN) < world_size_),
      process_(process_generation()),
      heap_(std::make_shared<SymmetricHeap>(segment, rank)),
      segment_(std::move(segment)),
      pidfds_(std::move(pidfds)),
      messages_(std::make_unique<Messages>(*this)) {
  if (!pidfds_.empty() && pidfds_.size() != static_cast<size_t>(world_size_)) {
    throw std::invalid_argument("pidfds must be one for each of " + std::to_string(world_size_) +
                                " ranks, or none for threads, got " +
                                std::to_string(pidfds_.size()));
  }
  if (!(timeout_.count() > 0 && timeout_.count() <= kMaxTimeout)) {
    throw std::invalid_argument("timeout must be above 0 and at most " +
                                format_seconds(Seconds(kMaxTimeout)) + ", got " +
                                format_seconds(timeout_));
  }
  segment_->touch_staging(rank_);
}

Communicator::~Communicator() {
  close();
  // In a forked child, nobody can end the waits of the parent's thread for the condition variables.
  if (process_ != process_generation()) (void)messages_.release();
}

void Communicator::close() { shut_down(RankStatus::kClosed); }

void Communicator::abort() { shut_down(RankStatus::failed(Reason::kAborted, rank_)); }

void Communicator::shut_down(uint32_t status) {
  closed_.store(true);  // A call in progress sees this and throws.
  // If that call is of this thread, it throws after the signal handler has returned, and the next
  // shut_down() does the rest.
  if (is_checking_interrupts(this)) return;
  // In a forked child, the locks and the status belong to the parent.
  const bool is_ours = process_ == process_generation();
  if (is_ours) messages_->stop();
  std::unique_lock<std::timed_mutex> hold(mutex_, std::defer_lock);
  if (is_ours) hold.lock();
  if (!segment_) return;
  if (is_ours && !failure_) publish(status, calls_ + 1);
  for (const int fd : pidfds_) {
    if (fd >= 0) ::close(fd);
  }
  segment_.reset();
  std::atomic_store(&heap_, std::shared_ptr<SymmetricHeap>());
}

std::shared_ptr<SymmetricHeap> Communicator::heap() const {
  check_process();
  auto heap = std::atomic_load(&heap_);
  if (!heap) throw std::runtime_error("this communicator has been closed; make a new one");
  return heap;
}

void Communicator::check_process() const {
  if (process_ != process_generation()) {
    throw std::runtime_error(
        "this communicator belongs to the process that made it, and cannot be used in a forked "
        "child; make a new one there");
  }
}

void Communicator::check_usable() const {
  if (closed_.load(std::memory_order_relaxed)) {
    throw std::runtime_error("this communicator has been closed; make a new one");
  }
  if (!failed_.load(std::memory_order_acquire)) return;
  const std::string message = "this communicator cannot be used after a failure (" +
                              failure_->message + "); make a new one";
  if (failure_->culprit == rank_ || failure_->reason == Reason::kTimedOut ||
      failure_->reason == Reason::kMismatched) {
    throw std::runtime_error(message);
  }
  throw PeerError(failure_->culprit, failure_->reason, message);
}

bool Communicator::meets_peers() {
  check_process();
  const std::unique_lock<std::timed_mutex> hold(mutex_, std::try_to_lock);
  if (!hold || failure_ || closed_.load(std::memory_order_relaxed)) return false;
  const auto next = static_cast<uint32_t>(calls_ + 1);
  state(rank_).coming.store(next, std::memory_order_relaxed);
  const auto end = Clock::now() + (oversubscribed_ ? Clock::duration(0) : kLook);
  for (int rank = 0; rank < world_size_; ++rank) {
    const std::atomic<uint32_t>& coming = state(rank).coming;
    while (static_cast<int32_t>(coming.load(std::memory_order_relaxed) - next) < 0) {
      if (Clock::now() >= end) return false;
      relax();
    }
  }
  return true;
}

// ---- waiting ----------------------------------------------------------------------------------

void Communicator::lock() {
  check_process();
  if (mutex_.try_lock()) return;
  if (is_checking_interrupts(this)) {
    throw std::runtime_error(
        "a signal handler cannot call a collective of a communicator while it interrupts another "
        "collective of the same one; raise an exception, which ends that collective");
  }
  before_wait_();
  const auto deadline = Clock::now() + timeout_;
  // The system clock, since ThreadSanitizer does not intercept timed locks with the steady clock.
  while (!mutex_.try_lock_until(std::chrono::system_clock::now() + kPollInterval)) {
    if (closed_.load(std::memory_order_relaxed)) check_usable();
    if (Clock::now() >= deadline) {
      throw TimeoutError(rank_,
                         "another thread has been in a collective of this communicator for " +
                             format_seconds(timeout_) + " (its timeout)");
    }
    interrupt_();
  }
}

// Whether `signal` reaches `target` before this rank has to sleep.
bool Communicator::await_briefly(const Signal& signal, uint32_t target, int spins) const {
  for (int i = 0; i < spins; ++i) {
    if (signal.reached(target)) return true;
    relax();
  }
  if (signal.reached(target)) return true;
  before_wait_();
  for (int i = 0; i < kYields; ++i) {
    if (signal.reached(target)) return true;
    sched_yield();
  }
  return false;
}

void Communicator::await(Signal& signal, uint32_t target, int owner, int spins) const {
  if (!await_briefly(signal, target, spins)) await_slowly(signal, target, owner);
}

void Communicator::await_slowly(Signal& signal, uint32_t target, int owner) const {
  const auto deadline = Clock::now() + timeout_;
  while (true) {
    check_peers(signal, target);
    signal.sleep(target, kPollInterval);
    if (signal.reached(target)) return;
    check_processes(signal, target);
    if (Clock::now() >= deadline) throw_timeout(signal, target, owner);
    interrupt();
  }
}

void Communicator::interrupt() const {
  const InterruptCheck mine{this, innermost_check};
  innermost_check = &mine;
  try {
    interrupt_();
  } catch (...) {
    innermost_check = mine.outer;
    throw;
  }
  innermost_check = mine.outer;
}

void Communicator::await_arrivals(uint32_t target, int spins) const {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    Signal& arrivals = state(rank).arrivals;
    await(arrivals, target, rank, spins);
    fuzz_delay();
    // A rank that failed in this collective may have signalled, but no longer preserves its data
    // for this rank.
    const uint32_t status = state(rank).status.load(std::memory_order_seq_cst);
    if (RankStatus::is_failed(status) &&
        state(rank).failed_call.load(std::memory_order_relaxed) <= calls_) {
      throw_peer_failure(rank, status);
    }
  }
}

// Throws if `signal` cannot reach `target` any more, because a rank has closed or failed.
void Communicator::check_peers(const Signal& signal, uint32_t target) const {
  for (int rank = 0; rank < world_size_; ++rank) {
    const uint32_t status = state(rank).status.load(std::memory_order_acquire);
    fuzz_delay();
    if (status != RankStatus::kOpen && !signal.reached(target)) throw_peer_failure(rank, status);
  }
  if (closed_.load(std::memory_order_relaxed)) {
    throw std::runtime_error("this communicator was closed during the call");
  }
}

// Throws if `signal` cannot reach `target` any more, because a process has ended.
void Communicator::check_processes(const Signal& signal, uint32_t target) const {
  if (is_threads()) return;
  std::vector<pollfd> polls;
  for (const int fd : pidfds_) polls.push_back({fd, POLLIN, 0});  // -1 is ignored.
  if (poll(polls.data(), polls.size(), 0) <= 0) return;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (polls[rank].revents != 0 && !signal.reached(target)) {
      // If the rank closed or failed before it ended, its status gives the better reason.
      check_peers(signal, target);
      throw PeerError(rank, Reason::kDied, rank_name(rank) + " has died");
    }
  }
}

void Communicator::throw_timeout(const Signal& signal, uint32_t target, int owner) const {
  std::string missing = std::to_string(owner);
  for (int rank = 0; rank < world_size_; ++rank) {
    const Signal& arrivals = state(rank).arrivals;
    const bool other = &signal == &state(owner).arrivals && rank != rank_ && rank != owner;
    if (other && !arrivals.reached(target)) missing += ", " + std::to_string(rank);
  }
  std::string message = "rank(s) " + missing + " of " + std::to_string(world_size_) +
                        " did not arrive at " + describe(call_) + ", collective number " +
                        std::to_string(calls_) + " of this communicator, within " +
                        format_seconds(timeout_);
  if (is_threads()) message += std::string("; ") + kRuleForThreads;
  throw TimeoutError(owner, message);
}

// ---- failure ----------------------------------------------------------------------------------

void Communicator::publish(uint32_t status, uint64_t failed_call) {
  RankState& mine = state(rank_);
  mine.failed_call.store(failed_call, std::memory_order_relaxed);
  mine.status.store(status, std::memory_order_seq_cst);
  for (Signal* signal : {&mine.arrivals, &mine.reduce_sent, &mine.gather_sent}) signal->wake();
}

void Communicator::check() {
  lock();
  const std::lock_guard<std::timed_mutex> hold(mutex_, std::adopt_lock);
  check_usable();
}

void Communicator::fail_externally(Reason reason, int culprit, const std::string& message) {
  const std::lock_guard<std::timed_mutex> hold(mutex_);
  if (failure_ || closed_.load(std::memory_order_relaxed)) return;
  publish(RankStatus::failed(reason, culprit), calls_ + 1);
  failure_ = Failure{reason, culprit, message};
  failed_.store(true, std::memory_order_release);
}

// Tells the peers that this rank has failed. If the ranks are threads, the caller may free its data
// as soon as the call has thrown, so this waits until no peer can access them any more: a peer that
// is inside a collective leaves it at its next wait, and a peer that enters one sees the status
// before it accesses any data.
void Communicator::fail(Failure failure) {
  publish(RankStatus::failed(failure.reason, failure.culprit), calls_);
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  fuzz_delay();
  state(rank_).inside.store(0, std::memory_order_seq_cst);
  if (!is_threads()) return;
  for (int rank = 0; rank < world_size_; ++rank) {
    while (state(rank).inside.load(std::memory_order_seq_cst) != 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

// ---- a collective -----------------------------------------------------------------------------

Collective::Collective(Communicator& communicator, const Call& call, const void* data, size_t bytes)
    : communicator_(communicator),
      bytes_(bytes),
      threads_(bytes < kManyBytes ? 1 : std::max(1, communicator.threads_())) {
  communicator_.lock();
  try {
    communicator_.check_usable();
    if (communicator_.calls_ == 0) communicator_.first_call_();
  } catch (...) {
    communicator_.mutex_.unlock();
    throw;
  }
  communicator_.call_ = call;
  ++communicator_.calls_;
  mine_.call = call;
  if (communicator_.is_threads()) {
    mine_.location = reinterpret_cast<uintptr_t>(data);
  } else if (communicator_.heap_->contains(data, bytes)) {
    mine_.location = static_cast<const std::byte*>(data) - segment().base();
  }
  // Before any access to peers' memory, and before any check whether a peer has failed; see fail().
  communicator_.state(rank()).inside.store(1, std::memory_order_seq_cst);
  fuzz_delay();
}

Collective::~Collective() {
  fuzz_delay();
  communicator_.state(rank()).inside.store(0, std::memory_order_release);
  communicator_.mutex_.unlock();
}

void Collective::signal() {
  fuzz_delay();
  // Right before the signal, since both share a cache line that peers are polling.
  if (!published_) {
    descriptor(rank()) = mine_;
    const auto call = static_cast<uint32_t>(communicator_.calls_);
    communicator_.state(rank()).coming.store(call, std::memory_order_relaxed);
  }
  published_ = true;
  Signal& arrivals = communicator_.state(rank()).arrivals;
  arrivals.raise(arrivals.own_value() + 1);
}

void Collective::wait() {
  communicator_.await_arrivals(communicator_.state(rank()).arrivals.own_value(), spins());
  if (!compared_) compare_descriptors();
  // The peers' caches hold copies of the line by now, which the next signal must invalidate.
  if (communicator_.prefetch_writes_) prefetch_for_write(&communicator_.state(rank()).arrivals);
}

void Collective::wait(Signal& signal, uint32_t target, int owner) {
  communicator_.await(signal, target, owner, spins());
}

int Collective::spins() const {
  if (communicator_.oversubscribed_) return 0;
  return compared_ ? kSpins : kSpinsFirst;
}

void Collective::prefetch_staging(size_t bytes) const {
  if (!communicator_.prefetch_writes_) return;
  constexpr size_t kLimit = 2 << 10;  // As much as can be in flight without stalling the core.
  for (size_t i = 0; i < std::min(bytes, kLimit); i += 64)
    prefetch_for_write(staging(rank(), 0) + i);
}

void Collective::compare_descriptors() {
  compared_ = true;
  bool equal = true;
  for (int peer = 0; peer < world_size(); ++peer) {
    equal = equal && same_call(descriptor(peer).call, mine_.call);
  }
  if (equal) return;
  std::vector<Call> calls;
  std::vector<int> ranks;
  for (int peer = 0; peer < world_size(); ++peer) {
    calls.push_back(descriptor(peer).call);
    ranks.push_back(peer);
  }
  throw MismatchError(describe_mismatch(calls.data(), ranks.data(), world_size()));
}

std::byte* Collective::data_of(int peer) const { return address(descriptor(peer).location); }

std::byte* Collective::address(uint64_t location) const {
  if (location == 0) return nullptr;
  if (communicator_.is_threads()) return reinterpret_cast<std::byte*>(location);
  return segment().base() + location;
}

int Collective::direct_ranks() const {
  int ranks = 0;
  for (int peer = 0; peer < world_size(); ++peer) ranks += descriptor(peer).location != 0;
  return ranks;
}

void Collective::abandon() {
  try {
    throw;
  } catch (const MismatchError&) {
    return;
  } catch (const PeerError& error) {
    communicator_.fail({error.reason, error.rank, error.what()});
  } catch (const TimeoutError& error) {
    communicator_.fail({Reason::kTimedOut, error.rank, error.what()});
  } catch (...) {
    communicator_.fail({Reason::kAborted, rank(), "a call was interrupted"});
  }
  // A peer that timed out because its process was stopped may continue later, and still write to
  // this rank's data.
  if (direct() && !communicator_.is_threads())
    communicator_.heap_->isolate(address(mine_.location), bytes_);
}

void barrier(Communicator& communicator) { announce(communicator, Call{}); }

void announce(Communicator& communicator, const Call& call) {
  run_collective(communicator, call, nullptr, 0, [](Collective& collective) {
    collective.signal();
    collective.wait();
  });
}

}  // namespace pipekernels
