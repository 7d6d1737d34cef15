// Which elements a thread block takes when, and which of them each rank reduces.
#pragma once

#include <cstddef>

#include "pipekernels/host/host_device.h"
#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

struct ChunkRange {
  size_t begin;
  size_t count;
};

// The chunks of one block: every blocks-th, from that of its own number on. So all blocks together
// go through the data from front to back.
class Chunks {
 public:
  PK_HOST_DEVICE Chunks(const DeviceLaunch& launch, int block)
      : count_(launch.count), chunk_(launch.chunk), block_(block), blocks_(launch.blocks) {}

  PK_HOST_DEVICE size_t rounds() const {
    const size_t chunks = (count_ + chunk_ - 1) / chunk_;
    return chunks > block_ ? (chunks - block_ - 1) / blocks_ + 1 : 0;
  }
  PK_HOST_DEVICE ChunkRange operator()(size_t round) const {
    const size_t begin = (block_ + round * blocks_) * chunk_;
    return {begin, count_ - begin < chunk_ ? count_ - begin : chunk_};
  }

 private:
  size_t count_, chunk_, block_, blocks_;
};

// The part of a chunk that a rank reduces; parts begin on whole packs of 16 bytes if the chunk
// does.
PK_HOST_DEVICE inline ChunkRange part_of(const ChunkRange& chunk, int part, int parts,
                                         size_t element_size) {
  const size_t pack = 16 / element_size;
  const size_t stride = ((chunk.count + parts - 1) / parts + pack - 1) / pack * pack;
  const size_t skipped = part * stride < chunk.count ? part * stride : chunk.count;
  const size_t left = chunk.count - skipped;
  return {chunk.begin + skipped, left < stride ? left : stride};
}

}  // namespace pipekernels
