#include "algorithms.h"
#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"

namespace pipekernels {

// Every rank copies its tensor to its staging, and reduces the staged tensors of all ranks.
void one_shot(Collective& collective, const Operand& operand) {
  const Slices chunks{operand.count, operand.count, kStagingBytes / operand.element_size};
  const int terms = collective.world_size();
  std::vector<const void*> sources(terms);
  const size_t rounds = chunks.blocks();
  for (size_t k = 0; k < rounds; ++k) {
    const Range chunk = chunks(0, k);
    copy_bytes(collective.staging(collective.rank(), k), operand.at(chunk.begin),
               chunk.count * operand.element_size);
    collective.signal();
    collective.wait();
    for (int rank = 0; rank < terms; ++rank) sources[rank] = collective.staging(rank, k);
    operand.reduce(operand.at(chunk.begin), sources, chunk.count);
  }
  collective.finish_rounds(rounds);
}

// For tensors of one block on few ranks. As one_shot(), but tensors that peers can access are not
// staged. If all ranks' tensors are accessible, they are reduced in place, whose two steps are then
// faster. If only some are, the owners of these keep their result in their own staging, which is
// otherwise unused, until all ranks have read their tensors.
void one_shot_or_in_place(Collective& collective, const Operand& operand) {
  const int terms = collective.world_size();
  const size_t bytes = operand.count * operand.element_size;
  if (!collective.direct())
    copy_bytes(collective.staging(collective.rank(), 0), operand.data, bytes);
  collective.signal();
  collective.wait();
  const int in_place = collective.direct_ranks();
  if (in_place == terms) return two_shot_in_place(collective, operand);
  std::vector<const void*> sources(terms);
  for (int rank = 0; rank < terms; ++rank) {
    const std::byte* data = collective.data_of(rank);
    sources[rank] = data ? data : collective.staging(rank, 0);
  }
  std::byte* result = collective.direct() ? collective.staging(collective.rank(), 0) : operand.data;
  operand.reduce(result, sources, operand.count);
  if (in_place > 0) {
    collective.signal();
    collective.wait();
    copy_bytes(operand.data, result, bytes);
  }
  collective.finish_rounds(1);
  if (!collective.direct()) collective.prefetch_staging(bytes);
}

}  // namespace pipekernels
