// Copies of tensors between a CUDA device and another one, or the CPU, in their own streams.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "pipekernels/p2p_copy/transfer.h"

namespace pipekernels {

constexpr int kHost = -1;  // the CPU, as the device of a channel

// Points in streams that others can wait for; none in a new event. When the last copy of an event
// is gone, its events go back to their pool. May be used by several threads, one at a time.
class P2PEvent {
 public:
  // Makes work issued later in `stream` of `device` wait. Returns false, and does nothing, if the
  // stream is being captured: a graph cannot wait for what happens outside of it. The default
  // streams of all devices have the same handle, null.
  bool wait(int device, void* stream) const;
  void synchronize() const;  // Makes the calling thread wait.
  bool is_done() const;      // Whether all points have been reached; also during captures.

 private:
  friend class P2PChannel;
  std::vector<std::shared_ptr<void>> events_;
};

// The direction from one device to another: its streams, events, and pinned memory.
//
// Memory. send() reads and writes memory that its caller owns. The caller keeps, until the event
// of the call says that the copies are done (in the order of the streams, or on the CPU):
//   - the sources on a CUDA device, or the snapshots instead; if send() returns true, also those
//     on the CPU;
//   - the targets. Those on a CUDA device come from an allocator that may give a block again to
//     arriving() once work issued in arriving() so far is done; copies into it wait for that.
//
// Order. Copies wait for work issued in the caller's stream, and for arriving(); of the target's
// other streams for none. arriving() waits for the copies.
//
// Threads. All methods may be called by any thread; calls of send() of one channel take turns.
//
// Captures. Neither of the channel's streams takes part in one: a captured stream is neither waited
// for nor made to wait.
class P2PChannel {
 public:
  // One of the devices is a CUDA device; pieces of `slot_bytes` go through pinned memory where the
  // source cannot write to the target, or is ordinary CPU memory. Enables peer access. Throws
  // std::runtime_error on a CUDA error, as all methods do.
  P2PChannel(int source, int target, size_t slot_bytes);
  // Waits for all copies. The streams remain: allocators may know memory by them.
  ~P2PChannel();
  P2PChannel(const P2PChannel&) = delete;
  P2PChannel& operator=(const P2PChannel&) = delete;

  int source() const;
  int target() const;
  void* leaving() const;   // The stream in which the source is read; null for the CPU.
  void* arriving() const;  // The stream that targets belong to; null for the CPU.
  bool has_peer_access() const;
  // Whether the source can write to the target as the driver says, but what it writes gets lost or
  // arrives changed: then copies go through pinned memory.
  bool has_broken_link() const;

  // Issues copies of all tensors, as they are at this point of `stream`, the caller's stream of the
  // source (if that is the CPU: now), and makes `event` the point after them.
  //
  // `snapshots` is empty, or has an address for each tensor, on the source device and laid out as
  // the target, to which it is copied first, in `stream`. Then the sources may be overwritten in
  // `stream` at once. Targets on the CPU are in pinned memory.
  //
  // What the CPU copies itself, it copies with at most `threads` threads.
  //
  // Returns whether CPU memory of sources is still read, which is so if it is pinned. The calling
  // thread waits only for pinned memory of the channel, where that is still in use.
  //
  // Throws std::runtime_error if `stream` is being captured, before anything is issued. After any
  // other error, nothing that was issued in the channel's streams still runs.
  bool send(P2PEvent& event, const std::vector<TensorCopy>& tensors,
            const std::vector<char*>& snapshots, void* stream, int threads);

  // Makes `event` the points after the work issued so far in the target's `streams`. Returns
  // false, and leaves it as it is, if one of them is being captured.
  bool mark(P2PEvent& event, const std::vector<void*>& streams);

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace pipekernels
