// The memory that the ranks of one communicator share.
//
// It is an anonymous memory file (memfd). Every rank that is a process maps it; ranks that are
// threads share one mapping. The file disappears with its last mapping:
//
//   [ states | device growths | buffers | symmetric heaps ], each of rank 0 .. n-1,
//   [ lanes ], from rank 0 to 0, from 0 to 1 and so on
//
// Pages are allocated when they are first touched, so unused heaps, lanes and mailboxes of rings
// cost only address space.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "pipekernels/collectives/call.h"
#include "pipekernels/shared_memory/device_growth.h"
#include "pipekernels/shared_memory/lane.h"
#include "pipekernels/shared_memory/signal.h"

namespace pipekernels {

// The state of one rank, written by that rank alone.
struct alignas(128) RankState {
  // Everything that peers read in every call lies in this one cache line, since fetching a line
  // from another core takes as long as the rest of a small call.
  //
  // Raised in every step that all ranks take together.
  alignas(64) Signal arrivals;
  // A RankStatus.
  std::atomic<uint32_t> status;
  // The number, modulo 2^32, of the latest collective that the rank is sure to make whatever its
  // peers do, as it makes it now or has told a thread to do so. Orders no other access.
  std::atomic<uint32_t> coming;
  // The last two collectives. A peer may still read the one before last.
  Descriptor descriptors[2];

  // Whether the rank is in a collective, in which it may access its peers' memory. Written in every
  // call; on its own line, so that the line stays in this rank's cache.
  alignas(64) std::atomic<uint32_t> inside;
  // If the rank has failed: the number of the first collective in which its data are invalid.
  std::atomic<uint64_t> failed_call;
  // The rank's process id while it has device memory of its peers mapped, else 0.
  std::atomic<int32_t> device_mapper;

  // Ring: the number of chunks that this rank has put into its mailboxes, which the next rank
  // reads.
  alignas(64) Signal reduce_sent;
  alignas(64) Signal gather_sent;

  // Rung by every rank that has put something into a lane to this rank, or taken it from one.
  alignas(64) Signal bell;
};

static_assert(offsetof(RankState, inside) == 64);

// Bytes in one staging buffer: small enough that all of them together stay in a core's L2.
constexpr size_t kStagingBytes = 256 << 10;
// Staging buffers per rank; all_reduce/two_shot.cpp explains why three.
constexpr int kStagingSets = 3;
// Slots of a ring mailbox (a power of two), and bytes in each.
constexpr int kRingDepth = 8;
constexpr size_t kRingSlotBytes = 32 << 10;
// Capacity of one rank's symmetric heap.
constexpr size_t kHeapBytes = size_t{16} << 30;

// The distance between the buffers of consecutive ranks. Reductions access the same offset of all
// ranks' buffers together, which must not conflict in the L1 cache of AMD's Zen to Zen 4. Its way
// predictor identifies lines by a hash of address bits 12..27, bit i xor bit 39 - i, and holds one
// line per set and hash (Lipp et al., "Take A Way", 2020). If the hashes are equal, a reduction
// takes twelve times as long. Any 128 consecutive multiples of this distance have distinct hashes.
constexpr size_t kRankSpacing = 2 << 20;
// Conflict-free as kRankSpacing is, since kHeapBytes is a multiple of 2^28.
constexpr size_t kHeapStride = kHeapBytes + kRankSpacing;

class Segment {
 public:
  // Returns the file descriptor of a new memory file for map(); the caller closes it. Throws
  // std::invalid_argument unless 1 <= world_size <= kMaxRanks, and std::system_error.
  static int create(int world_size);
  // Maps the file; the caller may close `fd` afterwards. Throws as create(), and
  // std::runtime_error if the file's size does not match `world_size`.
  static std::shared_ptr<Segment> map(int fd, int world_size);
  // Allocates the pages of the rank's staging, on the calling thread's memory node: each rank calls
  // it for its own staging, which its peers only read. The rank's first ring writes its mailboxes,
  // and so allocates their pages.
  void touch_staging(int rank) const;
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int world_size() const { return world_size_; }
  std::byte* base() const { return base_; }

  RankState& state(int rank) const { return reinterpret_cast<RankState*>(base_)[rank]; }
  // To be used only if there are at most kMaxDeviceRanks.
  DeviceGrowth& growth(int rank) const {
    return reinterpret_cast<DeviceGrowth*>(base_ + world_size_ * sizeof(RankState))[rank];
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
  Lane& lane(int from, int to) const {
    return reinterpret_cast<Lane*>(base_ + lanes_)[size_t(from) * world_size_ + to];
  }

 private:
  static constexpr size_t kMailboxes = kStagingSets * kStagingBytes;
  static constexpr size_t kBuffersBytes = kMailboxes + 2 * kRingDepth * kRingSlotBytes;
  static constexpr size_t kBuffersStride = kRankSpacing;
  static_assert(kBuffersBytes <= kBuffersStride);

  explicit Segment(int world_size);
  size_t size() const { return lanes_ + size_t(world_size_) * world_size_ * sizeof(Lane); }
  std::byte* buffers(int rank) const { return base_ + buffers_ + rank * kBuffersStride; }

  const int world_size_;
  const size_t buffers_;  // Offsets of the first rank's buffers, of the first heap and lane.
  const size_t heaps_;
  const size_t lanes_;
  std::byte* base_ = nullptr;
};

}  // namespace pipekernels
