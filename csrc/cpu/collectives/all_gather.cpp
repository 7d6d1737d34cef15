#include "pipekernels/collectives/all_gather.h"

#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"

namespace pipekernels {

// Every rank copies its data to its staging, block by block, and reads the staging of its peers.
// Block k + 1 is copied before block k is read, so that peers need not wait for it. That requires
// the three staging buffers: copy_in(k+1) comes after the wait for S_k, the signal of block k,
// which peers make after gather(k-2).
void all_gather(Communicator& communicator, const void* input, void* output, size_t count,
                DType dtype, uint32_t shape) {
  const int me = communicator.rank();
  const size_t size = size_of(dtype);
  const Slices blocks{count, count, kStagingBytes / size};
  const auto* mine = static_cast<const std::byte*>(input);
  auto* all = static_cast<std::byte*>(output);
  const Call call{Operation::kAllGather, dtype, {}, {}, 0, shape, count};

  run_collective(communicator, call, input, count * size, [&](Collective& collective) {
    const auto copy_in = [&](size_t k) {
      if (collective.direct()) return;
      const Range block = blocks(0, k);
      collective.copy(collective.staging(me, k), mine + block.begin * size, block.count * size);
    };
    const auto gather = [&](size_t k, const Range& block) {
      collective.in_parts_of_peers(block.count * size, [&](int rank, int part, int parts) {
        const Range piece = part_of(block, part, parts);
        const std::byte* data = collective.data_of(rank);
        const size_t skipped = piece.begin - block.begin;
        copy_bytes(all + (rank * count + piece.begin) * size,
                   data ? data + piece.begin * size : collective.staging(rank, k) + skipped * size,
                   piece.count * size);
      });
    };

    size_t rounds = blocks.blocks();
    copy_in(0);
    collective.signal();
    collective.copy(all + me * count * size, mine, count * size);  // While the peers come.
    collective.wait();
    const int direct = collective.direct_ranks();
    if (direct == collective.world_size()) {
      gather(0, {0, count});
      rounds = 0;
    }
    for (size_t k = 0; k < rounds; ++k) {
      if (k + 1 < rounds) {
        copy_in(k + 1);
        collective.signal();
      }
      gather(k, blocks(0, k));
      if (k + 1 < rounds) collective.wait();
    }
    if (direct > 0) {  // Peers may read `input` until this wait.
      collective.signal();
      collective.wait();
    }
    collective.finish_rounds(rounds);
  });
}

}  // namespace pipekernels
