// The memory that the ranks of one communicator share.
//
// An anonymous memory file, mapped by every rank (once, where the ranks are threads of a process),
// that disappears with its last mapping:
//
//   [ agreement | state of rank 0 .. n-1 | buffers of rank 0 .. n-1 | symmetric heap of rank 0 .. ]
//
// Pages are taken when they are first touched, so the heaps cost address space alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "pipekernels/collectives/call.h"
#include "pipekernels/shared_memory/signal.h"

namespace pipekernels {

// What all ranks must do alike, written before any of them maps the memory.
struct alignas(128) Agreement {
  uint64_t one_shot_bytes;  // 0: built-in. See choose_algorithm() in all_reduce.h.
};

// The state of one rank, written by that rank alone.
struct alignas(128) RankState {
  // All that peers look at in every call lies in one cache line, since it takes that line as long
  // to come from another core as a small call takes otherwise.
  //
  // Raised by every step that all ranks take together.
  alignas(64) Signal arrivals;
  // A RankStatus.
  std::atomic<uint32_t> status;
  // Of the last two collectives: a peer may still read the one before last.
  Descriptor descriptors[2];

  // Whether the rank is in a collective, in which it may access its peers' memory. Written in every
  // call, and apart from the line above so that it stays in the rank's own cache.
  alignas(64) std::atomic<uint32_t> inside;
  // If it has failed: the number of the collective since which its data are invalid.
  std::atomic<uint64_t> failed_call;
  // The process, if it has device memory of its peers mapped; else 0.
  std::atomic<int32_t> device_mapper;

  // Ring: how many chunks this rank has put into its mailboxes, which the next rank reads.
  alignas(64) Signal reduce_sent;
  alignas(64) Signal gather_sent;
};

static_assert(offsetof(RankState, inside) == 64);

// Bytes in one staging buffer: small enough that all of them together stay in a core's L2.
constexpr size_t kStagingBytes = 256 << 10;
// How many of them a rank has, see two_shot() in all_reduce.cpp.
constexpr int kStagingSets = 3;
// Slots of a ring mailbox (a power of two), and bytes in each.
constexpr int kRingDepth = 8;
constexpr size_t kRingSlotBytes = 32 << 10;
// How large one rank's symmetric heap may become.
constexpr size_t kHeapBytes = size_t{16} << 30;

// What ranks have at the same offset is read and written together, so it must not lie at a distance
// that fits the L1 cache of AMD's Zen to Zen 4 badly. That finds lines by a hash of bits 12..27 of
// their addresses, bit i xor bit 39 - i, and holds one line of a set and a hash (Lipp et al., "Take
// A Way", 2020): with equal hashes a reduction takes twelve times as long. Among up to 128
// multiples of this size in a row no two are equal.
constexpr size_t kApart = 2 << 20;
constexpr size_t kHeapStride = kHeapBytes + kApart;

class Segment {
 public:
  // Returns the descriptor of a new memory file of the right size for map(). Throws
  // std::invalid_argument unless 1 <= world_size <= kMaxRanks.
  static int create(int world_size, size_t one_shot_bytes = 0);
  // Maps the file; the caller may close `fd` afterwards. Throws std::invalid_argument likewise, and
  // std::runtime_error for a file of another size.
  static std::shared_ptr<Segment> map(int fd, int world_size);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int world_size() const { return world_size_; }
  std::byte* base() const { return base_; }

  const Agreement& agreement() const { return *reinterpret_cast<const Agreement*>(base_); }
  RankState& state(int rank) const {
    return reinterpret_cast<RankState*>(base_ + sizeof(Agreement))[rank];
  }
  std::byte* staging(int rank, uint64_t round) const {
    return buffers(rank) + round % kStagingSets * kStagingBytes;
  }
  std::byte* reduce_mailbox(int rank, uint32_t slot) const {
    return buffers(rank) + kMailboxes + slot % kRingDepth * kRingSlotBytes;
  }
  std::byte* gather_mailbox(int rank, uint32_t slot) const {
    return reduce_mailbox(rank, slot) + kRingDepth * kRingSlotBytes;
  }
  std::byte* heap(int rank) const { return base_ + heaps_ + rank * kHeapStride; }

 private:
  static constexpr size_t kMailboxes = kStagingSets * kStagingBytes;
  static constexpr size_t kBuffersBytes = kMailboxes + 2 * kRingDepth * kRingSlotBytes;
  static constexpr size_t kBuffersStride = kApart;
  static_assert(kBuffersBytes <= kBuffersStride);

  explicit Segment(int world_size);
  size_t size() const { return heaps_ + world_size_ * kHeapStride; }
  std::byte* buffers(int rank) const { return base_ + buffers_ + rank * kBuffersStride; }

  const int world_size_;
  const size_t buffers_;  // Offsets of the first rank's buffers and of the first heap.
  const size_t heaps_;
  std::byte* base_ = nullptr;
};

}  // namespace pipekernels
