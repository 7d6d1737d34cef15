#include "pipekernels/collectives/messages.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/copy.h"

// From each rank to each leads a lane: a ring of entries, and chunks of memory. The sender of a
// message announces it by an entry, with its first chunk, and goes on with further chunks. The
// receiver takes all entries as they come and keeps them, so that messages may be received in
// another order than they were sent in. When a receive and a message match, it says so by an entry
// of the lane back, and from then on reads the message's chunks.
//
//     rank 0                      lane 0 -> 1, lane 1 -> 0           rank 1
//     send(tag 5, 40 KiB)         announced(5, 40 KiB, chunk 0) ->
//                                 moved(chunk 1) ->
//                                 moved(chunk 2) ->
//                                 <- matched(40 KiB)                 receive(tag 5, 40 KiB)
//     wait() returns              <- chunks 0, 1, 2 are free         wait() returns
//
// A send ends when it is matched and all its bytes are in chunks, as in Gloo. So both sides learn
// if their sizes differ, and a send that nobody receives does not go unnoticed.
//
// No data race. An entry, and the chunks that it names, are written before the release store of
// `posted`, and read after its acquire load. A chunk is read before the release of its bit in
// `freed`, and written again after the exchange that acquires it; an entry likewise by `taken`.
//
// No deadlock. Messages that are not matched occupy at most kChunks - kReserved chunks. A matched
// message moves through the others, since its receiver reads every chunk that it finds: in wait(),
// whichever message that waits for, or in the thread below. Entries do not wait for receives, and
// replies have a queue in private memory, so no ring stays full while its reader makes progress.
//
// No lost wake-up. Who posts an entry, frees a chunk or takes an entry rings the bell of the other
// rank afterwards. Who finds nothing to do sleeps until the next ring after the value of the bell
// that it has read before it looked; see Signal.
//
// Progress without calls: the thread of a rank moves messages while no call of the rank waits. It
// looks once per tick, so that calls that wait soon do not wake it, and parks when nothing moves.

namespace pipekernels {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kReserved = 16;  // Chunks that only matched messages may occupy.
constexpr std::chrono::milliseconds kTick{1};
constexpr int kIdleTicks = 100;  // Until the thread parks.

int lowest(uint64_t chunks) { return __builtin_ctzll(chunks); }
uint64_t bit(int chunk) { return uint64_t{1} << chunk; }

std::string mismatch(int from, int to, uint32_t tag, size_t sent, size_t received) {
  return rank_name(from) + " sends " + std::to_string(sent) + " bytes with tag " +
         std::to_string(tag) + " to " + rank_name(to) + ", which receives " +
         std::to_string(received) + " bytes; pass tensors of the same size";
}

}  // namespace

Messages::Messages(Communicator& communicator)
    : communicator_(communicator),
      segment_(communicator.segment()),
      me_(communicator.rank()),
      peers_(communicator.world_size()) {}

Messages::~Messages() { stop(); }

void Messages::stop() {
  std::unique_lock<std::mutex> hold(mutex_);
  stopped_ = true;
  unparked_.notify_all();
  if (segment_) bell().ring();
  left_.wait(hold, [this] { return waiters_ == 0; });
  const auto thread = std::move(thread_);
  segment_.reset();
  hold.unlock();
  if (thread) thread->join();
}

// ---- calls ------------------------------------------------------------------------------------

std::shared_ptr<Message> Messages::start(bool is_send, void* data, size_t bytes, int rank,
                                         uint32_t tag) {
  const int ranks = static_cast<int>(peers_.size());
  if (rank >= ranks || rank < (is_send ? 0 : kAnyRank)) {
    throw std::invalid_argument(std::string(is_send ? "dst" : "src") + " must be a rank in 0.." +
                                std::to_string(ranks - 1) + ", got " + std::to_string(rank));
  }
  communicator_.check_process();
  std::shared_ptr<Message> message(
      new Message{is_send, rank, tag, static_cast<std::byte*>(data), bytes});
  const std::lock_guard<std::mutex> hold(mutex_);
  communicator_.check_usable();
  for (int each = 0; each < ranks; ++each) {
    if (rank == kAnyRank || rank == each) peer(each);
  }
  if (is_send) {
    peer(rank).sends.push_back(message);
  } else {
    const auto fits = [&](const Arrival& each) {
      return !each.receive && each.announced.tag == tag &&
             (rank == kAnyRank || each.peer.rank == rank);
    };
    const auto arrival = std::find_if(arrivals_.begin(), arrivals_.end(), fits);
    if (arrival == arrivals_.end()) {
      receives_.push_back(message);
    } else {
      match(arrival, message);
    }
  }
  progress();
  if (!message->done && parked_ && needs_thread()) {
    parked_ = false;
    if (thread_) {
      unparked_.notify_all();
    } else {
      thread_ = std::make_unique<std::thread>([this] { run(); });
    }
  }
  return message;
}

bool Messages::is_done(Message& message) {
  communicator_.check_process();
  if (message.done) return true;
  const std::lock_guard<std::mutex> hold(mutex_);
  if (!stopped_) progress();
  return message.done;
}

bool Messages::wait(Message& message, std::optional<Seconds> limit) {
  communicator_.check_process();
  const auto count = [this](int waiters) {
    const std::lock_guard<std::mutex> hold(mutex_);
    if (stopped_ && waiters > 0) communicator_.check_usable();  // Throws.
    waiters_ += waiters;
    left_.notify_all();
  };
  if (!message.done) {
    count(1);
    try {
      await(message, limit.value_or(communicator_.timeout_ + Seconds(1)));
    } catch (...) {
      abandon(message);
      count(-1);
      throw;
    }
    count(-1);
  }
  if (!message.done) return false;
  if (message.problem.empty()) return true;
  communicator_.check_usable();
  throw MismatchError(message.problem);
}

void Messages::await(Message& message, Seconds limit) {
  const auto begin = Clock::now();
  auto next_check = begin + kPollInterval;
  while (true) {
    const uint32_t seen = bell().value();
    if (is_done(message)) return;
    const int spins = communicator_.oversubscribed_ ? 0 : kSpins;
    const bool rung = communicator_.await_briefly(bell(), seen + 1, spins);
    if (rung && Clock::now() < next_check) continue;
    communicator_.before_wait_();
    check(message);
    if (!message.done) bell().sleep(seen + 1, kPollInterval);
    if (is_done(message)) return;
    const Seconds waited = Clock::now() - begin;
    if (waited >= communicator_.timeout_) {
      throw TimeoutError(std::max(message.peer.load(), 0),
                         describe(message) + " within " + format_seconds(communicator_.timeout_));
    }
    if (waited >= limit) return;
    communicator_.interrupt();
    next_check = Clock::now() + kPollInterval;
  }
}

// Throws if a peer without which the message cannot end has left. What it has done before counts.
void Messages::check(const Message& message) {
  communicator_.check_usable();
  const int ranks = static_cast<int>(peers_.size());
  int closed = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == me_ || (message.peer != rank && message.peer != kAnyRank)) continue;
    pollfd process{communicator_.is_threads() ? -1 : communicator_.pidfds_[rank], POLLIN, 0};
    const bool died = poll(&process, 1, 0) > 0;
    const uint32_t status = segment_->state(rank).status.load(std::memory_order_acquire);
    if (!died && status == RankStatus::kOpen) continue;
    // A receive from any rank does without peers that have ended their work, but the last.
    closed += status == RankStatus::kClosed;
    if (message.peer == kAnyRank && status == RankStatus::kClosed && closed < ranks - 1) continue;
    const std::lock_guard<std::mutex> hold(mutex_);
    progress();
    if (message.done) return;
    if (status != RankStatus::kOpen) throw_peer_failure(rank, status);
    throw PeerError(rank, Reason::kDied, rank_name(rank) + " has died");
  }
}

// Like Collective::abandon(): nothing accesses the memory of the message any more.
void Messages::abandon(Message& message) {
  const auto is_it = [&](const std::shared_ptr<Message>& each) { return each.get() == &message; };
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    receives_.remove_if(is_it);
    arrivals_.remove_if([&](const Arrival& each) { return is_it(each.receive); });
    for (Peer* each : active_) each->sends.remove_if(is_it);
    message.problem = "given up";
    message.done = true;
  }
  try {
    throw;
  } catch (const PeerError& error) {
    communicator_.fail_externally(error.reason, error.rank, error.what());
  } catch (const TimeoutError& error) {
    communicator_.fail_externally(Reason::kTimedOut, error.rank, error.what());
  } catch (...) {
    communicator_.fail_externally(Reason::kAborted, me_, "a call was interrupted");
  }
}

std::string Messages::describe(const Message& message) const {
  const std::string what = std::to_string(message.bytes) + " bytes with tag " +
                           std::to_string(message.tag) + " that " + rank_name(me_) +
                           (message.is_send ? " sends" : " receives");
  if (message.peer == kAnyRank) return "no rank has sent the " + what + " from any rank";
  return rank_name(message.peer) +
         (message.is_send ? " has not received the " : " has not sent the ") + what;
}

// ---- progress ---------------------------------------------------------------------------------

Messages::Peer& Messages::peer(int rank) {
  auto& found = peers_[rank];
  if (!found) {
    found.reset(new Peer{rank, segment_->lane(rank, me_), segment_->lane(me_, rank)});
    active_.push_back(found.get());
  }
  return *found;
}

void Messages::progress() {
  for (Peer* each : active_) progress(*each);
}

void Messages::progress(Peer& peer) {
  const uint32_t posted = peer.in.posted.load(std::memory_order_acquire);
  if (posted != peer.taken) {
    for (; peer.taken != posted; ++peer.taken) {
      take(peer, peer.in.entries[peer.taken % Lane::kEntries]);
    }
    fuzz_delay();
    peer.in.taken.store(posted, std::memory_order_release);
    peer.owes_ring = true;
  }
  while (!peer.replies.empty() && has_room(peer)) {
    post(peer, peer.replies.front());
    peer.replies.pop_front();
  }
  push(peer);
  if (peer.owes_ring) segment_->state(peer.rank).bell.ring();
  peer.owes_ring = false;
}

void Messages::take(Peer& peer, const Entry& entry) {
  if (entry.kind == Entry::kAnnounced) {
    arrivals_.push_back({peer, entry, {entry.chunks}});
    const auto fits = [&](const std::shared_ptr<Message>& each) {
      return each->tag == entry.tag && (each->peer == kAnyRank || each->peer == peer.rank);
    };
    const auto receive = std::find_if(receives_.begin(), receives_.end(), fits);
    if (receive == receives_.end()) return;
    const auto message = *receive;
    receives_.erase(receive);
    match(std::prev(arrivals_.end()), message);
  } else if (entry.kind == Entry::kMoved) {
    const auto arrival = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& each) {
      return &each.peer == &peer && each.announced.id == entry.id;
    });
    if (arrival == arrivals_.end()) {  // Its receive has failed.
      peer.in.freed.fetch_or(entry.chunks, std::memory_order_release);
      return;
    }
    arrival->chunks.push_back(entry.chunks);
    if (arrival->receive) deliver(arrival);
  } else {
    conclude(peer, entry);
  }
}

void Messages::match(Arrivals::iterator arrival, std::shared_ptr<Message> receive) {
  Peer& peer = arrival->peer;
  receive->peer = peer.rank;
  const Entry reply{Entry::kMatched, arrival->announced.id, 0, receive->bytes};
  if (peer.replies.empty() && has_room(peer)) {
    post(peer, reply);
  } else {
    peer.replies.push_back(reply);
  }
  if (receive->bytes == arrival->announced.bytes) {
    arrival->receive = std::move(receive);
    return deliver(arrival);
  }
  receive->problem =
      mismatch(peer.rank, me_, receive->tag, arrival->announced.bytes, receive->bytes);
  for (const uint64_t chunks : arrival->chunks)
    peer.in.freed.fetch_or(chunks, std::memory_order_release);
  peer.owes_ring = true;
  arrivals_.erase(arrival);
  receive->done = true;
}

// Copies the bytes that have arrived to the receive.
void Messages::deliver(Arrivals::iterator arrival) {
  Message& message = *arrival->receive;
  Peer& peer = arrival->peer;
  for (uint64_t chunks : arrival->chunks) {
    for (; chunks != 0; chunks &= chunks - 1) {
      const size_t count = std::min(Lane::kChunkBytes, message.bytes - message.moved);
      copy_bytes(message.data + message.moved, peer.in.chunk(lowest(chunks)), count);
      message.moved += count;
      fuzz_delay();
      peer.in.freed.fetch_or(bit(lowest(chunks)), std::memory_order_release);
      peer.owes_ring = true;
    }
  }
  arrival->chunks.clear();
  if (message.moved < message.bytes) return;
  message.done = true;
  arrivals_.erase(arrival);
}

// A receive has taken a send of this rank.
void Messages::conclude(Peer& peer, const Entry& reply) {
  const auto found = std::find_if(peer.sends.begin(), peer.sends.end(), [&](const auto& each) {
    return each->announced && each->id == reply.id;
  });
  if (found == peer.sends.end()) return;  // Its wait() has failed.
  Message& message = **found;
  message.matched = true;
  if (reply.bytes != message.bytes) {
    message.problem = mismatch(me_, peer.rank, message.tag, message.bytes, reply.bytes);
  }
  if (message.problem.empty() && message.moved < message.bytes) return;
  message.done = true;
  peer.sends.erase(found);
}

// Moves the sends to `peer` on, as far as there is room.
void Messages::push(Peer& peer) {
  if (peer.sends.empty()) return;
  peer.free_chunks |= peer.out.freed.exchange(0, std::memory_order_acquire);
  for (auto next = peer.sends.begin(); next != peer.sends.end();) {
    Message& message = **next;
    while (!message.announced || message.moved < message.bytes) {
      if (!has_room(peer)) return;
      const uint64_t chunk = fill_chunk(peer, message);
      if (!message.announced) {
        message.announced = true;
        message.id = peer.next_id++;
        post(peer, {Entry::kAnnounced, message.id, message.tag, message.bytes, chunk});
      } else if (chunk != 0) {
        post(peer, {Entry::kMoved, message.id, 0, 0, chunk});
      } else {
        break;
      }
    }
    const bool ended = message.matched && message.moved == message.bytes;
    if (ended) message.done = true;
    next = ended ? peer.sends.erase(next) : std::next(next);
  }
}

// Copies the next bytes of a send to a chunk, and returns its bit, or 0 if there is none left.
uint64_t Messages::fill_chunk(Peer& peer, Message& message) {
  const int free = __builtin_popcountll(peer.free_chunks);
  if (message.moved == message.bytes || free <= (message.matched ? 0 : kReserved)) return 0;
  const int chunk = lowest(peer.free_chunks);
  const size_t count = std::min(Lane::kChunkBytes, message.bytes - message.moved);
  copy_bytes(peer.out.chunk(chunk), message.data + message.moved, count);
  message.moved += count;
  peer.free_chunks &= ~bit(chunk);
  return bit(chunk);
}

bool Messages::has_room(const Peer& peer) const {
  return peer.posted - peer.out.taken.load(std::memory_order_acquire) < Lane::kEntries;
}

void Messages::post(Peer& peer, const Entry& entry) {
  peer.out.entries[peer.posted % Lane::kEntries] = entry;
  fuzz_delay();
  peer.out.posted.store(++peer.posted, std::memory_order_release);
  segment_->state(peer.rank).bell.ring();
  peer.owes_ring = false;
}

// ---- the thread -------------------------------------------------------------------------------

// Whether a message may need this rank to move on.
bool Messages::needs_thread() const {
  const auto is_late = [](const std::shared_ptr<Message>& send) {
    return !send->announced || send->moved < send->bytes;
  };
  return !receives_.empty() ||
         std::any_of(arrivals_.begin(), arrivals_.end(),
                     [](const Arrival& each) { return each.receive != nullptr; }) ||
         std::any_of(active_.begin(), active_.end(), [&](const Peer* peer) {
           return !peer->replies.empty() ||
                  std::any_of(peer->sends.begin(), peer->sends.end(), is_late);
         });
}

void Messages::run() {
  std::unique_lock<std::mutex> hold(mutex_);
  const auto segment = segment_;  // Until this thread no longer uses the bell.
  bool needed_before = false;
  for (int idle = 0; !stopped_;) {
    const bool needed = needs_thread();
    idle = needed ? 0 : idle + 1;
    if (needed && needed_before && waiters_ == 0) {
      Signal& bell = segment->state(me_).bell;
      const uint32_t seen = bell.value();
      progress();
      hold.unlock();
      bell.sleep(seen + 1, kPollInterval);
      hold.lock();
    } else if (idle < kIdleTicks) {
      // The system clock, since ThreadSanitizer does not know waits by the steady clock.
      unparked_.wait_until(hold, std::chrono::system_clock::now() + kTick);
    } else {
      parked_ = true;
      unparked_.wait(hold, [this] { return stopped_ || !parked_; });
      idle = 0;
    }
    needed_before = needed;
  }
}

}  // namespace pipekernels
