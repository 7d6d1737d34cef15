#include "pipekernels/collectives/reduce_scatter.h"

#include <vector>

#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {

// The reduction half of all_reduce/two_shot.cpp; each rank keeps the slice that it reduces.
void reduce_scatter(Communicator& communicator, const void* input, void* output, size_t count,
                    DType dtype, Reduction reduction, uint32_t shape) {
  const ReduceKernels& kernels = reduce_kernels(dtype, reduction);
  const int me = communicator.rank();
  const int terms = communicator.world_size();
  const size_t size = size_of(dtype);
  const size_t block_size = kStagingBytes / terms / 64 * 64;
  const Slices slices{terms * count, count, block_size / size};
  const auto* mine = static_cast<const std::byte*>(input);
  const Call call{Operation::kReduceScatter, dtype, reduction, {}, 0, shape, terms * count};

  run_collective(communicator, call, input, terms * count * size, [&](Collective& collective) {
    const auto copy_in = [&](size_t k) {
      if (collective.direct()) return;
      collective.in_parts_of_peers(block_size, [&](int rank, int part, int parts) {
        const Range block = slices(rank, k);
        const Range piece = part_of(block, part, parts);
        std::byte* staged = collective.staging(me, k) + rank * block_size;
        copy_bytes(staged + (piece.begin - block.begin) * size, mine + piece.begin * size,
                   piece.count * size);
      });
    };
    const auto reduce = [&](size_t k, const Range& block) {
      collective.in_parts(1, block.count * size, [&](int, int part, int parts) {
        const Range piece = part_of(block, part, parts);
        std::vector<const void*> sources(terms);
        for (int rank = 0; rank < terms; ++rank) {
          const std::byte* data = rank == me ? mine : collective.data_of(rank);
          const std::byte* staged = collective.staging(rank, k) + me * block_size;
          sources[rank] =
              data ? data + piece.begin * size : staged + (piece.begin - block.begin) * size;
        }
        const size_t begin = piece.begin - slices.slice(me).begin;
        void* destination = static_cast<std::byte*>(output) + begin * size;
        kernels.reduce(destination, sources.data(), terms, piece.count);
      });
    };

    size_t rounds = slices.blocks();
    copy_in(0);
    collective.signal();
    collective.wait();
    const int direct = collective.direct_ranks();
    if (direct == terms) {
      reduce(0, slices.slice(me));
      rounds = 0;
    }
    for (size_t k = 0; k < rounds; ++k) {
      reduce(k, slices(me, k));
      if (k + 1 < rounds) {
        copy_in(k + 1);
        collective.signal();
        collective.wait();
      }
    }
    if (direct > 0) {  // Peers may read `input` until this wait.
      collective.signal();
      collective.wait();
    }
    collective.finish_rounds(rounds);
  });
}

}  // namespace pipekernels
