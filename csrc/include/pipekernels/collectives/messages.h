// Messages: one rank sends, another receives what has the same tag, while all ranks may do other
// things; cpu/collectives/messages.cpp explains the protocol. And the collective in which every
// rank sends each rank a part of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pipekernels/host/errors.h"
#include "pipekernels/shared_memory/segment.h"

namespace pipekernels {

class Communicator;
using Seconds = std::chrono::duration<double>;
constexpr int kAnyRank = -1;

// A send or a receive, guarded by the lock of Messages but for `done`.
struct Message {
  const bool is_send;
  std::atomic<int> peer;  // kAnyRank until a receive from any rank has found its sender.
  const uint32_t tag;
  std::byte* const data;
  const size_t bytes;
  size_t moved = 0;        // Bytes copied from or to `data`.
  uint32_t id = 0;         // Of a send, once it is announced.
  bool announced = false;  // Of a send.
  bool matched = false;    // Whether the other side's call is known, and as large.
  std::string problem{};   // If the message fails.
  std::atomic<bool> done{false};
};

// The messages of one rank of a communicator. A message in progress reads or writes its memory
// until wait() has returned, or the communicator is closed.
class Messages {
 public:
  explicit Messages(Communicator& communicator);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Starts a send or a receive, without waiting for the peer. `peer` may be this rank; of a receive
  // also kAnyRank. Messages from one rank with one tag are received in the order in which they are
  // sent. Throws std::invalid_argument unless `peer` is a rank.
  std::shared_ptr<Message> start(bool is_send, void* data, size_t bytes, int peer, uint32_t tag);

  // Moves what can be moved now; returns whether the message has ended.
  bool is_done(Message& message);
  // Waits until the bytes of a receive are in place, or the receiver of a send has made its call
  // and the memory of the send is no longer read. Returns false if `limit` passes before, and
  // leaves the message in progress. Throws a MismatchError, as on the other side, if the other side
  // has another size; the exceptions of errors.h that end the communicator, if the peer is lost
  // (for a receive from any rank: one has died or failed, or all have closed), or if the
  // communicator's timeout passes.
  bool wait(Message& message, std::optional<Seconds> limit = {});

  // Ends all messages: they no longer access memory. For a communicator that is marked as closed,
  // so that calls in progress throw.
  void stop();

 private:
  // What this rank knows of another one.
  struct Peer {
    const int rank;
    Lane& in;
    Lane& out;
    uint32_t taken = 0, posted = 0;  // Entries of `in` and `out` so far.
    uint32_t next_id = 0;
    uint64_t free_chunks = ~uint64_t{0};          // Of `out`.
    bool owes_ring = false;                       // For entries and chunks of `in` taken.
    std::deque<Entry> replies{};                  // To be posted before anything else.
    std::list<std::shared_ptr<Message>> sends{};  // Not done.
  };
  // A message that a peer has announced, and which has not arrived as a whole.
  struct Arrival {
    Peer& peer;
    const Entry announced;
    std::vector<uint64_t> chunks{};  // Not yet read.
    std::shared_ptr<Message> receive{};
  };

  using Arrivals = std::list<Arrival>;

  void await(Message& message, Seconds limit);
  void check(const Message& message);
  void abandon(Message& message);
  std::string describe(const Message& message) const;
  Signal& bell() const { return segment_->state(me_).bell; }
  Peer& peer(int rank);

  // With the lock.
  void progress();
  void progress(Peer& peer);
  void take(Peer& peer, const Entry& entry);
  void match(Arrivals::iterator arrival, std::shared_ptr<Message> receive);
  void deliver(Arrivals::iterator arrival);
  void conclude(Peer& peer, const Entry& reply);
  void push(Peer& peer);
  uint64_t fill_chunk(Peer& peer, Message& message);
  bool has_room(const Peer& peer) const;
  void post(Peer& peer, const Entry& entry);
  bool needs_thread() const;

  void run();

  Communicator& communicator_;
  std::shared_ptr<Segment> segment_;  // Null after stop().
  const int me_;

  std::mutex mutex_;  // Guards the members below. Held while chunks are copied, never in a wait.
  std::vector<std::unique_ptr<Peer>> peers_;  // Null until the first message.
  std::vector<Peer*> active_;
  std::list<Arrival> arrivals_;                   // In the order in which they were taken.
  std::list<std::shared_ptr<Message>> receives_;  // Without a match, in the order of their calls.
  int waiters_ = 0;                               // Threads in wait().
  bool stopped_ = false;
  bool parked_ = true;                       // Whether the thread waits until messages need it.
  std::condition_variable left_, unparked_;  // Of waiters_; of the other two.
  std::unique_ptr<std::thread> thread_;      // Started by the first message that needs it.
};

// Memory of `bytes`, which may differ from part to part.
struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};

// As `call`, copies sent[to] of each rank to received[from] of rank `to`; both have a part for each
// rank, empty ones too, of a gather only one that is sent. The parts must not overlap, but for a
// rank's part from itself. Throws std::invalid_argument unless there are as many parts; a
// MismatchError also if a rank sends another size than its peer receives; and the exceptions of
// errors.h.
void exchange(Communicator& communicator, const Call& call, const std::vector<Part>& sent,
              const std::vector<Part>& received);

}  // namespace pipekernels
