#include "algorithms.h"
#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"

namespace pipekernels {

// Every rank reduces its slice, reading all peers' tensors and writing into them. The memory
// traffic is 2 bytes per rank and byte of the tensor.
void two_shot_in_place(Collective& collective, const Operand& operand) {
  const int terms = collective.world_size();
  const Range slice = Slices::even(operand.count, terms, operand.element_size, operand.count)
                          .slice(collective.rank());
  const size_t bytes = slice.count * operand.element_size;
  collective.in_parts(1, bytes, [&](int, int part, int parts) {
    const Range piece = part_of(slice, part, parts);
    std::vector<void*> data(terms);
    for (int rank = 0; rank < terms; ++rank) {
      data[rank] = collective.data_of(rank) + piece.begin * operand.element_size;
    }
    operand.reduce_in_place(data, collective.rank(), piece.count);
  });
  collective.signal();
  collective.wait();
}

// Every rank reduces its slice, block by block, and the other ranks gather it. Round k is
//
//   copy_in(k)  copies the blocks that peers reduce to this rank's staging;
//   signal, wait;
//   reduce(k)   reduces this rank's own block, to its tensor and to all peers' staging, where it
//               overwrites their inputs. It has just read those lines itself, and writing them is
//               cheaper than writing lines that another core has read last;
//   signal, wait;
//   gather(k)   copies the peers' results from this rank's staging to its tensor.
//
// Rounds overlap: one signal S_k says that inputs k and results k - 1 are ready.
//
//   copy_in(0) S_0 | wait S_k, reduce(k), copy_in(k+1), S_k+1, gather(k-1) | ... wait, gather(last)
//
// Peers use this rank's staging k between their wait for S_k and their S_k+1. This rank runs
// gather(k) after its wait for S_k+1 and before copy_in(k+3), in program order, so three staging
// buffers suffice. That holds across calls of all collectives, since rounds are counted through all
// calls, no peer uses staging k after its S_k+2, and a rank leaves a call only after all ranks have
// made their last signal.
//
// A rank whose tensor is accessible to its peers copies nothing in or out: the peers read its
// inputs, and write its results, in place.
void two_shot(Collective& collective, const Operand& operand) {
  const int me = collective.rank();
  const int terms = collective.world_size();
  const size_t size = operand.element_size;
  const size_t block_size = kStagingBytes / terms / 64 * 64;
  const Slices slices = Slices::even(operand.count, terms, size, block_size / size);
  const size_t rounds = slices.blocks();

  // Calls copy(data, staged, bytes) for this rank's blocks of all peers' slices.
  const auto for_peers = [&](size_t k, auto copy) {
    if (collective.direct() || k >= rounds) return;
    collective.in_parts_of_peers(block_size, [&](int rank, int part, int parts) {
      const Range block = slices(rank, k);
      const Range piece = part_of(block, part, parts);
      std::byte* staged = collective.staging(me, k) + rank * block_size;
      copy(operand.at(piece.begin), staged + (piece.begin - block.begin) * size,
           piece.count * size);
    });
  };
  const auto copy_in = [&](size_t k) {
    for_peers(k, [](void* data, void* staged, size_t bytes) { copy_bytes(staged, data, bytes); });
  };
  const auto gather = [&](size_t k) {
    for_peers(k, [](void* data, void* staged, size_t bytes) { copy_bytes(data, staged, bytes); });
  };
  const auto reduce = [&](size_t k) {
    const Range block = slices(me, k);
    collective.in_parts(1, block.count * size, [&](int, int part, int parts) {
      const Range piece = part_of(block, part, parts);
      std::vector<void*> tensors(terms);
      for (int rank = 0; rank < terms; ++rank) {
        std::byte* whole = rank == me ? operand.data : collective.data_of(rank);
        std::byte* staged = collective.staging(rank, k) + me * block_size;
        tensors[rank] =
            whole ? whole + piece.begin * size : staged + (piece.begin - block.begin) * size;
      }
      operand.reduce_in_place(tensors, me, piece.count);
    });
  };

  copy_in(0);
  collective.signal();
  collective.wait();
  if (collective.direct_ranks() == terms) return two_shot_in_place(collective, operand);
  for (size_t k = 0; k < rounds; ++k) {
    reduce(k);
    copy_in(k + 1);
    collective.signal();
    if (k > 0) gather(k - 1);
    collective.wait();
  }
  if (rounds > 0) gather(rounds - 1);
  collective.finish_rounds(rounds);
}

}  // namespace pipekernels
