// The way of messages from one rank to another in shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pipekernels {

// What a lane carries in order. The first two kinds come from a sender of messages; the third goes
// the other way, on the lane back.
struct Entry {
  enum Kind : uint32_t {
    kAnnounced,  // Message `id` of `bytes` with `tag` waits for a receive.
    kMoved,      // The next bytes of message `id` lie in `chunks`.
    kMatched,    // A receive of `bytes` takes the sender's message `id`.
  };
  Kind kind = kAnnounced;
  uint32_t id = 0;
  uint32_t tag = 0;
  uint64_t bytes = 0;
  uint64_t chunks = 0;  // Chunks with the next bytes, a bit for each, in ascending order.
};

// Zeroed memory is a valid initial state. Pages are allocated when a pair of ranks first uses them.
struct alignas(4096) Lane {
  static constexpr uint32_t kEntries = 64;  // A power of two, as counts wrap around.
  static constexpr int kChunks = 64;
  static constexpr size_t kChunkBytes = 16 << 10;

  std::byte* chunk(int index) { return chunks[index]; }

  alignas(64) std::atomic<uint32_t> posted;  // Entries so far, written by the sending rank.
  alignas(64) std::atomic<uint32_t> taken;   // Entries that the receiving rank has read.
  std::atomic<uint64_t> freed;               // Chunks that it has read since the sender looked.
  alignas(64) Entry entries[kEntries];
  alignas(4096) std::byte chunks[kChunks][kChunkBytes];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics must work between processes");

}  // namespace pipekernels
