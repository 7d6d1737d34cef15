#include "pipekernels/collectives/gather.h"

#include <stdexcept>
#include <string>

#include "pipekernels/collectives/broadcast.h"
#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"

namespace pipekernels {
namespace {

void check(const Communicator& communicator, size_t tensors, int root) {
  check_root(root, communicator.world_size());
  const size_t wanted = root == communicator.rank() ? communicator.world_size() : 0;
  if (tensors == wanted) return;
  throw std::invalid_argument("rank " + std::to_string(communicator.rank()) + " needs " +
                              std::to_string(wanted) + " tensors, got " + std::to_string(tensors));
}

}  // namespace

// As all_gather(), but only the root reads.
void gather(Communicator& communicator, const void* input, const std::vector<void*>& outputs,
            size_t count, DType dtype, int root) {
  check(communicator, outputs.size(), root);
  const int me = communicator.rank();
  const size_t size = size_of(dtype);
  const Slices blocks{count, count, kStagingBytes / size};
  const auto* mine = static_cast<const std::byte*>(input);
  const Call call{Operation::kGather, dtype, {}, {}, static_cast<uint32_t>(root), 0, count};

  run_collective(communicator, call, input, count * size, [&](Collective& collective) {
    const auto copy_in = [&](size_t k) {
      if (me == root || collective.direct()) return;
      const Range block = blocks(0, k);
      copy_bytes(collective.staging(me, k), mine + block.begin * size, block.count * size);
    };
    const auto copy_out = [&](size_t k) {
      if (me != root) return;
      const Range block = blocks(0, k);
      for (int rank = 0; rank < collective.world_size(); ++rank) {
        const std::byte* data = rank == me ? mine : collective.data_of(rank);
        auto* output = static_cast<std::byte*>(outputs[rank]) + block.begin * size;
        const auto* source = data ? data + block.begin * size : collective.staging(rank, k);
        copy_bytes(output, source, block.count * size);
      }
    };

    const size_t rounds = blocks.blocks();
    copy_in(0);
    collective.signal();
    collective.wait();
    for (size_t k = 0; k < rounds; ++k) {
      if (k + 1 < rounds) {
        copy_in(k + 1);
        collective.signal();
      }
      copy_out(k);
      if (k + 1 < rounds) collective.wait();
    }
    if (collective.direct_ranks() > 0) {  // The root may read `input` until this wait.
      collective.signal();
      collective.wait();
    }
    collective.finish_rounds(rounds);
  });
}

// As broadcast() of all ranks' data, of which each rank reads its own.
void scatter(Communicator& communicator, const std::vector<const void*>& inputs, void* output,
             size_t count, DType dtype, int root) {
  check(communicator, inputs.size(), root);
  const int me = communicator.rank();
  const int ranks = communicator.world_size();
  const size_t size = size_of(dtype);
  // The part of each rank in a staging buffer.
  const size_t part = kStagingBytes / ranks / 64 * 64;
  const Slices blocks{count, count, part / size};
  const Call call{Operation::kScatter, dtype, {}, {}, static_cast<uint32_t>(root), 0, count};

  run_collective(communicator, call, nullptr, 0, [&](Collective& collective) {
    const auto copy_in = [&](size_t k) {
      if (me != root) return;
      const Range block = blocks(0, k);
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == me) continue;
        copy_bytes(collective.staging(me, k) + rank * part,
                   static_cast<const std::byte*>(inputs[rank]) + block.begin * size,
                   block.count * size);
      }
    };
    const auto copy_out = [&](size_t k) {
      const Range block = blocks(0, k);
      const std::byte* source = collective.staging(root, k) + me * part;
      if (me == root) source = static_cast<const std::byte*>(inputs[me]) + block.begin * size;
      auto* destination = static_cast<std::byte*>(output) + block.begin * size;
      copy_bytes(destination, source, block.count * size);
    };

    const size_t rounds = blocks.blocks();
    copy_in(0);
    collective.signal();
    collective.wait();
    for (size_t k = 0; k < rounds; ++k) {
      if (k + 1 < rounds) {
        copy_in(k + 1);
        collective.signal();
      }
      copy_out(k);
      if (k + 1 < rounds) collective.wait();
    }
    collective.finish_rounds(rounds);
  });
}

}  // namespace pipekernels
