#include "pipekernels/collectives/broadcast.h"

#include <stdexcept>
#include <string>

#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"

namespace pipekernels {

void check_root(int root, int world_size) {
  if (root >= 0 && root < world_size) return;
  throw std::invalid_argument("src must be a rank in 0.." + std::to_string(world_size - 1) +
                              ", got " + std::to_string(root));
}

// As all_gather(), but only the root has data.
void broadcast(Communicator& communicator, void* data, size_t count, DType dtype, int root,
               uint32_t shape) {
  check_root(root, communicator.world_size());
  const int me = communicator.rank();
  const size_t size = size_of(dtype);
  const Slices blocks{count, count, kStagingBytes / size};
  auto* mine = static_cast<std::byte*>(data);
  const Call call{Operation::kBroadcast, dtype, {}, {}, static_cast<uint32_t>(root), shape, count};

  run_collective(communicator, call, data, count * size, [&](Collective& collective) {
    const auto copy_in = [&](size_t k) {
      if (me != root || collective.direct()) return;
      const Range block = blocks(0, k);
      collective.copy(collective.staging(me, k), mine + block.begin * size, block.count * size);
    };
    const auto copy_out = [&](const std::byte* source, const Range& block) {
      if (me != root) collective.copy(mine + block.begin * size, source, block.count * size);
    };

    size_t rounds = blocks.blocks();
    copy_in(0);
    collective.signal();
    collective.wait();
    if (const std::byte* source = collective.data_of(root)) {
      copy_out(source, {0, count});
      collective.signal();  // Peers may read the root's data until the following wait.
      collective.wait();
      rounds = 0;
    }
    for (size_t k = 0; k < rounds; ++k) {
      if (k + 1 < rounds) {
        copy_in(k + 1);
        collective.signal();
      }
      copy_out(collective.staging(root, k), blocks(0, k));
      if (k + 1 < rounds) collective.wait();
    }
    collective.finish_rounds(rounds);
  });
}

}  // namespace pipekernels
