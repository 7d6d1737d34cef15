// The device memory that the ranks of a communicator share, and the arguments of a kernel launch.
//
// Every rank owns one allocation of device memory, which all ranks can read and write:
//
//   [ control | thread block states | cells | inboxes | staging per thread block | symmetric heap ]
//
// A communicator that was split off another one uses the heap of that one instead. The heap grows
// by further allocations, see CudaHeap.
//
// Thread block b of a rank synchronises only with thread block b of every other rank. Each block
// index has its own cells, inboxes, counters and staging, so calls may differ in their number of
// blocks and in how they divide the data among them. A rank writes its signals into the memory of
// the rank that waits for them, so that a waiting rank polls only its own memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipekernels/collectives/call.h"
#include "pipekernels/host/host_device.h"
#include "pipekernels/shared_memory/device_growth.h"

namespace pipekernels {

constexpr int kMaxDeviceBlocks = 64;  // Per rank.

// Numbers of staging buffers per thread block; compare segment.h.
constexpr int kDeviceInputSets = 2;
constexpr int kDeviceResultSets = 3;

// Inboxes for words that a rank pushes to another; used in turn. See OneShotBlock::pushed().
constexpr int kInboxes = 2;
constexpr int kPushedCallWords = 5;  // The words of an inbox that tell the call; data follow.

// One per rank.
struct alignas(128) DeviceControl {
  // failed[r]: the RankStatus of rank r if it has failed on its device, else 0. Only rank r writes
  // it.
  uint64_t failed[kMaxDeviceRanks];
  // Whether one of this rank's thread blocks has begun to report a failure to the host.
  uint64_t reported;
};

// Counters of one thread block of one rank, over all calls so far. They are in memory, not in the
// launch's arguments, so that a captured launch can be replayed.
struct DeviceCounters {
  uint64_t signals;
  uint64_t calls;   // That have signalled.
  uint64_t rounds;  // Rounds of staging.
  uint64_t chunks;  // Chunks of rings.
  uint64_t pushes;  // Rounds of pushed words.
};

// Only that block uses it.
struct alignas(128) DeviceBlockState {
  DeviceCounters counters;
  uint64_t busy;  // 1 while a collective runs, which two must not at once.
};

// Written by block b of one rank, polled by block b of another. The counters only grow.
struct alignas(128) DeviceCell {
  uint64_t arrivals;
  uint64_t reduce_sent;  // Ring: chunks put into the mailboxes of the polling rank.
  uint64_t gather_sent;
  // The last two calls. The polling rank may still read the one before last.
  Descriptor calls[2];
};

// The layout of a rank's memory; the same on all ranks.
struct DeviceLayout {
  int32_t ranks;
  int32_t blocks;
  uint32_t set_bytes;        // Size of one staging buffer; a multiple of 128.
  uint32_t slot_bytes;       // Size of one slot of a ring mailbox; a multiple of 128.
  uint32_t min_chunk_bytes;  // Least size of a chunk in a launch of more than one.
  uint32_t inbox_bytes;      // Data that an inbox has room for; a multiple of 64.
  uint32_t push_limit;       // Largest tensor whose one-shot all-reduce pushes words, in bytes.
  // Whether reductions of 16 or 64 bits over two ranks keep as many loads in flight as those over
  // four. Not measured.
  bool wide_loads = false;

  // Slots per ring mailbox. With ring_schedule()'s lag of one slot less, rank 0 takes as many
  // chunks as there are ranks before it waits for the first result, the time that this one needs.
  PK_HOST_DEVICE int ring_depth() const { return ranks < 8 ? ranks + 1 : 8; }
  PK_HOST_DEVICE size_t staging_stride() const {
    return size_t{kDeviceInputSets + kDeviceResultSets} * set_bytes +
           size_t{2} * ring_depth() * slot_bytes;
  }
  PK_HOST_DEVICE size_t cells() const {
    return sizeof(DeviceControl) + blocks * sizeof(DeviceBlockState);
  }
  PK_HOST_DEVICE size_t inboxes() const {
    return cells() + size_t{1} * blocks * ranks * sizeof(DeviceCell);
  }
  PK_HOST_DEVICE size_t inbox_words() const {  // A multiple of 128 bytes.
    return (kPushedCallWords + inbox_bytes / 4 + 15) / 16 * 16;
  }
  PK_HOST_DEVICE size_t control_bytes() const {
    return inboxes() + blocks * kInboxes * ranks * inbox_words() * sizeof(uint64_t);
  }
  PK_HOST_DEVICE size_t heap() const { return control_bytes() + blocks * staging_stride(); }

  // What `writer` writes to the owner of `memory` to check the link, two pages, in memory that is
  // the staging's later.
  PK_HOST_DEVICE uint64_t* checked(std::byte* memory, int writer) const {
    return reinterpret_cast<uint64_t*>(memory + control_bytes() + writer * size_t{8192});
  }
  // The bytes at the beginning that must be zeroed before the first launch.
  PK_HOST_DEVICE size_t zeroed_bytes() const { return control_bytes() + ranks * size_t{8192}; }
  PK_HOST_DEVICE DeviceControl& control(std::byte* memory) const {
    return *reinterpret_cast<DeviceControl*>(memory);
  }
  PK_HOST_DEVICE DeviceBlockState& state(std::byte* memory, int block) const {
    return reinterpret_cast<DeviceBlockState*>(memory + sizeof(DeviceControl))[block];
  }
  // The cell that `writer` writes and the owner of `memory` polls.
  PK_HOST_DEVICE DeviceCell& cell(std::byte* memory, int block, int writer) const {
    return reinterpret_cast<DeviceCell*>(memory + cells())[block * ranks + writer];
  }
  // Where `writer` pushes the words of a round to the owner of `memory`. The inboxes of one block
  // are contiguous: those of even rounds, then those of odd rounds.
  PK_HOST_DEVICE uint64_t* inbox(std::byte* memory, int block, uint64_t round, int writer) const {
    const size_t number = (block * kInboxes + round % kInboxes) * ranks + writer;
    return reinterpret_cast<uint64_t*>(memory + inboxes()) + number * inbox_words();
  }
  PK_HOST_DEVICE std::byte* input(std::byte* memory, int block, uint64_t round) const {
    return staging(memory, block) + round % kDeviceInputSets * set_bytes;
  }
  PK_HOST_DEVICE std::byte* result(std::byte* memory, int block, uint64_t round) const {
    return staging(memory, block) + (kDeviceInputSets + round % kDeviceResultSets) * set_bytes;
  }
  PK_HOST_DEVICE std::byte* reduce_mailbox(std::byte* memory, int block, uint64_t chunk) const {
    return staging(memory, block) + size_t{kDeviceInputSets + kDeviceResultSets} * set_bytes +
           chunk % ring_depth() * slot_bytes;
  }
  PK_HOST_DEVICE std::byte* gather_mailbox(std::byte* memory, int block, uint64_t chunk) const {
    return reduce_mailbox(memory, block, chunk) + size_t{1} * ring_depth() * slot_bytes;
  }

 private:
  PK_HOST_DEVICE std::byte* staging(std::byte* memory, int block) const {
    return memory + control_bytes() + block * staging_stride();
  }
};

// Why a rank's kernel has given up a collective.
enum class DeviceFailureKind : uint32_t {
  kMissing,   // `rank` did not arrive in time.
  kPeer,      // `rank` has failed, with `status`.
  kStopped,   // The host has stopped the kernel because of `rank`, which has `status`.
  kMismatch,  // `rank` called a different collective.
  kOverlap,   // Another collective of this rank still runs.
};

struct DeviceFailure {
  DeviceFailureKind kind;
  int32_t rank;
  uint32_t status;
  Call mine;
  Call theirs;  // Only for kMismatch.
};

// Flags in pinned host memory, through which a rank's host and its kernels tell each other to stop.
struct HostFlags {
  uint64_t stop;          // Written by the host. 0: continue. See stop_for().
  uint64_t reported;      // Written by the device: 1 once `failure` is complete.
  DeviceFailure failure;  // Written by the device.
  uint64_t unreached;  // Written by the device: bit r if the link to rank r has failed its check.

  // The rank that is the reason in the low half, its RankStatus in the high half.
  PK_HOST_DEVICE static uint64_t stop_for(int rank, uint32_t status) {
    return static_cast<uint64_t>(status) << 32 | static_cast<uint32_t>(rank);
  }
};

// The bits of a Descriptor's location on CUDA that are an offset. Those above are 0 for an offset
// in the rank's first allocation, i + 1 in growth i of its heap.
constexpr int kLocationBits = 48;

// The communicator, as a rank's kernels see it.
struct DeviceRanks {
  DeviceLayout layout;
  int32_t rank;
  uint64_t timeout;                    // Nanoseconds, for each wait.
  HostFlags* host;                     // As mapped on this rank's device.
  std::byte* memory[kMaxDeviceRanks];  // Of each rank, as mapped on this rank's device.
  // What locations count from: `memory` or a parent's, and the growths, null where not yet mapped.
  std::byte* heap[1 + kGrowths][kMaxDeviceRanks];

  PK_HOST_DEVICE std::byte* at(int peer, uint64_t location) const {
    return heap[location >> kLocationBits][peer] +
           (location & ((uint64_t{1} << kLocationBits) - 1));
  }
};

// The argument of every collective kernel.
struct DeviceLaunch {
  DeviceRanks ranks;
  Descriptor descriptor;
  const std::byte* input;
  std::byte* output;  // May equal `input`.
  size_t count;       // Elements (or bytes) divided among the blocks; see each collective.
  size_t chunk;       // Elements (or bytes) that a block processes at a time.
  int32_t blocks;
  bool pushed = false;  // A one-shot all-reduce: whether it pushes words.
};

// DeviceLayout::push_limit. Pushed words spare a fence and the wait for its signal, but carry as
// many bytes of flags as of data, to each peer. An estimate, not a measurement.
constexpr uint32_t push_limit(int ranks) {
  return ranks <= 8 ? 64 << 10 : ranks <= 16 ? 32 << 10 : 16 << 10;
}

// How a launch divides `count` elements: the number of blocks, and the elements per chunk.
struct DeviceGrid {
  int32_t blocks;
  size_t chunk;
};

// Chunks have at most `max_bytes` and, if there is more than one, at least `min_bytes`, and start
// on multiples of 64 bytes. The numbers of chunks per block differ by at most one. The result
// depends only on the arguments, so all ranks compute the same grid.
inline DeviceGrid plan_grid(size_t count, size_t element_size, size_t max_bytes, size_t min_bytes,
                            int max_blocks) {
  const size_t line = 64 / element_size;
  const auto divide_up = [](size_t a, size_t b) { return (a + b - 1) / b; };
  const size_t most = max_bytes / element_size / line * line;
  const size_t rounds = divide_up(divide_up(count, most), max_blocks);
  if (rounds == 0) return {1, most};
  size_t chunk = divide_up(divide_up(count, rounds * max_blocks), line) * line;
  const size_t least = divide_up(min_bytes, element_size * line) * line;
  if (chunk < least) chunk = least < most ? least : most;
  const size_t chunks = divide_up(count, chunk);
  return {static_cast<int32_t>(chunks < size_t(max_blocks) ? chunks : max_blocks), chunk};
}

}  // namespace pipekernels
