// The chunks of a tensor that each thread block processes, and the part of a chunk that each rank
// reduces.
#pragma once

#include <cstddef>

#include "pipekernels/host/host_device.h"
#include "pipekernels/shared_memory/device_memory.h"

namespace pipekernels {

struct ChunkRange {
  size_t begin;
  size_t count;
};

// The chunks of one block: every blocks-th chunk, starting with the one of the block's index, so
// that all blocks together proceed from the front of the data to the back.
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

// The part of a chunk that rank `part` of `parts` reduces. If the chunk is aligned to 16 bytes, so
// are its parts.
PK_HOST_DEVICE inline ChunkRange part_of(const ChunkRange& chunk, int part, int parts,
                                         size_t element_size) {
  const size_t pack = 16 / element_size;
  const size_t stride = ((chunk.count + parts - 1) / parts + pack - 1) / pack * pack;
  const size_t skipped = part * stride < chunk.count ? part * stride : chunk.count;
  const size_t left = chunk.count - skipped;
  return {chunk.begin + skipped, left < stride ? left : stride};
}

}  // namespace pipekernels
