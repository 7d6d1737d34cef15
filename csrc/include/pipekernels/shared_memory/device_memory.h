// What the ranks of a communicator share on CUDA devices, and what a launch is told.
//
// Every rank owns one block of device memory, that all ranks can read and write:
//
//   [ control | states of its thread blocks | cells | staging of each thread block | symmetric heap
//   ]
//
// Block b of a rank meets block b of every other rank and no other: each number has cells, counters
// and staging of its own, so it does not matter how many blocks a call has, nor how it divides the
// data among them. Signals are written into the memory of the rank that waits for them, which polls
// its own memory alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipekernels/collectives/call.h"
#include "pipekernels/host/host_device.h"

namespace pipekernels {

constexpr int kMaxDeviceRanks = 32;   // The addresses of all their memory are kernel parameters.
constexpr int kMaxDeviceBlocks = 64;  // Per rank.

// How many sets of each there are, as in segment.h.
constexpr int kDeviceInputSets = 2;
constexpr int kDeviceResultSets = 3;
constexpr int kDeviceRingDepth = 8;

// Of one rank.
struct alignas(128) DeviceControl {
  // By rank: its RankStatus if it has failed on its device. Each is written by that rank alone.
  uint64_t failed[kMaxDeviceRanks];
  // Whether one of this rank's blocks has begun to report a failure.
  uint64_t reported;
};

// Of one block of one rank, which alone uses it: what it has done so far, in all calls. Kept here
// and not in the launch's arguments so that a captured launch can be replayed.
struct alignas(128) DeviceBlockState {
  uint64_t signals;
  uint64_t calls;
  uint64_t rounds;  // Of staging.
  uint64_t chunks;  // Of rings.
};

// Written by block b of one rank, polled by block b of another. The counters only grow.
struct alignas(128) DeviceCell {
  uint64_t arrivals;
  uint64_t reduce_sent;  // Ring: chunks put into the mailboxes of the rank that polls.
  uint64_t gather_sent;
  // Of the last two calls: the rank that polls may still read the one before last.
  Descriptor calls[2];
};

// Where things are in a rank's memory; the same on all ranks.
struct DeviceLayout {
  int32_t ranks;
  int32_t blocks;
  uint32_t set_bytes;    // Of a set of staging buffers; a multiple of 128.
  uint32_t slot_bytes;   // Of a slot of a ring's mailbox; likewise.
  uint32_t least_bytes;  // Of a chunk, where a launch has more than one.

  PK_HOST_DEVICE size_t staging_stride() const {
    return size_t{kDeviceInputSets + kDeviceResultSets} * set_bytes +
           size_t{2 * kDeviceRingDepth} * slot_bytes;
  }
  PK_HOST_DEVICE size_t cells() const {
    return sizeof(DeviceControl) + blocks * sizeof(DeviceBlockState);
  }
  // What is to be zero at first.
  PK_HOST_DEVICE size_t control_bytes() const {
    return cells() + size_t{1} * blocks * ranks * sizeof(DeviceCell);
  }
  PK_HOST_DEVICE size_t heap() const { return control_bytes() + blocks * staging_stride(); }

  PK_HOST_DEVICE DeviceControl& control(std::byte* memory) const {
    return *reinterpret_cast<DeviceControl*>(memory);
  }
  PK_HOST_DEVICE DeviceBlockState& state(std::byte* memory, int block) const {
    return reinterpret_cast<DeviceBlockState*>(memory + sizeof(DeviceControl))[block];
  }
  // What `writer` says to the rank that `memory` belongs to.
  PK_HOST_DEVICE DeviceCell& cell(std::byte* memory, int block, int writer) const {
    return reinterpret_cast<DeviceCell*>(memory + cells())[block * ranks + writer];
  }
  PK_HOST_DEVICE std::byte* input(std::byte* memory, int block, uint64_t round) const {
    return staging(memory, block) + round % kDeviceInputSets * set_bytes;
  }
  PK_HOST_DEVICE std::byte* result(std::byte* memory, int block, uint64_t round) const {
    return staging(memory, block) + (kDeviceInputSets + round % kDeviceResultSets) * set_bytes;
  }
  PK_HOST_DEVICE std::byte* reduce_mailbox(std::byte* memory, int block, uint64_t chunk) const {
    return staging(memory, block) + size_t{kDeviceInputSets + kDeviceResultSets} * set_bytes +
           chunk % kDeviceRingDepth * slot_bytes;
  }
  PK_HOST_DEVICE std::byte* gather_mailbox(std::byte* memory, int block, uint64_t chunk) const {
    return reduce_mailbox(memory, block, chunk) + size_t{kDeviceRingDepth} * slot_bytes;
  }

 private:
  PK_HOST_DEVICE std::byte* staging(std::byte* memory, int block) const {
    return memory + control_bytes() + block * staging_stride();
  }
};

// Why a rank's kernel has left a collective.
enum class DeviceFailureKind : uint32_t {
  kMissing,   // `rank` did not arrive in time.
  kNotReady,  // Nor did this rank's own data.
  kPeer,      // `rank` has failed, with `status`.
  kStopped,   // The host has said so, with `status`, which tells about `rank`.
  kMismatch,  // `rank` calls something else.
};

struct DeviceFailure {
  DeviceFailureKind kind;
  int32_t rank;
  uint32_t status;
  Call mine;
  Call theirs;  // Of a mismatch.
};

// In pinned memory of this rank's host.
struct HostFlags {
  uint64_t stop;      // By the host: a rank in the low half, its RankStatus in the high; 0: go on.
  uint64_t reported;  // By the device: whether `failure` is complete.
  DeviceFailure failure;

  PK_HOST_DEVICE static uint64_t stop_for(int rank, uint32_t status) {
    return static_cast<uint64_t>(status) << 32 | static_cast<uint32_t>(rank);
  }
};

// What a rank's kernels know of its communicator.
struct DeviceRanks {
  DeviceLayout layout;
  int32_t rank;
  uint64_t timeout;  // Nanoseconds, for each wait.
  HostFlags* host;
  std::byte* memory[kMaxDeviceRanks];  // Of each rank, as mapped here.
};

// Counters that the writer of a tensor raises, block by block of its elements.
struct Gates {
  const int32_t* ready;  // Null: the tensor is complete.
  int32_t target;
  size_t block_elements;
};

// What one launch does.
struct DeviceLaunch {
  DeviceRanks ranks;
  Descriptor descriptor;
  const std::byte* input;
  std::byte* output;  // May be the input.
  size_t count;       // Elements of what is divided among the blocks: see each collective.
  size_t chunk;       // Elements that a block takes at a time.
  int32_t blocks;
  Gates gates;
};

// How a launch divides `count` elements: among so many blocks, in chunks of so many elements.
struct DeviceGrid {
  int32_t blocks;
  size_t chunk;
};

// Chunks have at most `limit` bytes and, where there is more than one, at least `least`, and start
// on multiples of 64 bytes. Blocks have the same number of chunks, or one less. The same on all
// ranks, as it depends on nothing else.
inline DeviceGrid plan_grid(size_t count, size_t element_size, size_t limit, size_t least,
                            int max_blocks) {
  const size_t line = 64 / element_size;
  const auto divide_up = [](size_t a, size_t b) { return (a + b - 1) / b; };
  const size_t most = limit / element_size / line * line;
  const size_t rounds = divide_up(divide_up(count, most), max_blocks);
  if (rounds == 0) return {1, most};
  size_t chunk = divide_up(divide_up(count, rounds * max_blocks), line) * line;
  const size_t few = divide_up(least, element_size * line) * line;
  if (chunk < few) chunk = few < most ? few : most;
  const size_t chunks = divide_up(count, chunk);
  return {static_cast<int32_t>(chunks < size_t(max_blocks) ? chunks : max_blocks), chunk};
}

}  // namespace pipekernels
