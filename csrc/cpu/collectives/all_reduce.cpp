#include "pipekernels/collectives/all_reduce.h"

#include <algorithm>
#include <vector>

#include "pipekernels/collectives/ring_schedule.h"
#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"
#include "pipekernels/elements/reduce.h"
#include "pipekernels/elements/tree_order.h"

namespace pipekernels {
namespace {

// More ranks than this often share cores, which makes a step slow.
constexpr int kFewRanks = 4;

// Default for unmeasured machines: up to this size, one_shot (one step, n reads) beats two_shot.
constexpr size_t one_shot_bytes(int ranks) { return ranks <= kFewRanks ? 2 << 10 : 16 << 10; }

// The tensor of this rank, and the kernels that reduce it.
struct Operand {
  std::byte* data;
  size_t count;
  size_t element_size;
  size_t partial_size;
  Reduction reduction;
  const ReduceKernels& kernels;

  std::byte* at(size_t element) const { return data + element * element_size; }

  void reduce(void* destination, const std::vector<const void*>& sources, size_t elements) const {
    kernels.reduce(destination, sources.data(), static_cast<int>(sources.size()), elements);
  }
  void reduce_in_place(const std::vector<void*>& tensors, int rank, size_t elements) const {
    kernels.reduce_in_place(tensors.data(), static_cast<int>(tensors.size()), rank, elements);
  }
};

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

// Every rank reduces its slice, reading all peers' tensors and writing into them. The memory
// traffic is 2 bytes per rank and byte of the tensor.
void two_shot_in_place(Collective& collective, const Operand& operand) {
  const int terms = collective.world_size();
  const Range slice = Slices::even(operand.count, terms, operand.element_size, operand.count)
                          .slice(collective.rank());
  std::vector<void*> data(terms);
  for (int rank = 0; rank < terms; ++rank) {
    data[rank] = collective.data_of(rank) + slice.begin * operand.element_size;
  }
  operand.reduce_in_place(data, collective.rank(), slice.count);
  collective.signal();
  collective.wait();
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
    for (int rank = 0; rank < terms; ++rank) {
      if (rank == me) continue;
      const Range block = slices(rank, k);
      copy(operand.at(block.begin), collective.staging(me, k) + rank * block_size,
           block.count * size);
    }
  };
  const auto copy_in = [&](size_t k) {
    for_peers(k, [](void* data, void* staged, size_t bytes) { copy_bytes(staged, data, bytes); });
  };
  const auto gather = [&](size_t k) {
    for_peers(k, [](void* data, void* staged, size_t bytes) { copy_bytes(data, staged, bytes); });
  };
  std::vector<void*> tensors(terms);
  const auto reduce = [&](size_t k) {
    const Range block = slices(me, k);
    for (int rank = 0; rank < terms; ++rank) {
      std::byte* whole = rank == me ? operand.data : collective.data_of(rank);
      tensors[rank] =
          whole ? whole + block.begin * size : collective.staging(rank, k) + me * block_size;
    }
    operand.reduce_in_place(tensors, me, block.count);
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

// Every rank exchanges data only with its two neighbours. The partial results of a chunk travel
// from rank 0 to rank n - 1, which reduces in rank order; the final result travels from there to
// rank 0 and on to rank n - 2. The ranks work on different chunks at the same time, in the order of
// ring_schedule.h. Chunks are numbered through all calls, as the signals are. In tree order,
// several partial results of a chunk share a slot, so chunks are smaller.
void ring(Collective& collective, const Operand& operand) {
  collective.signal();
  collective.wait();

  Segment& segment = collective.segment();
  const int me = collective.rank();
  const int last = collective.world_size() - 1;
  const int before = me == 0 ? last : me - 1;
  RankState& mine = segment.state(me);
  Signal& reduced_before = segment.state(before).reduce_sent;
  Signal& gathered_before = segment.state(before).gather_sent;
  const int partials = most_partials(last + 1, operand.reduction);
  const size_t stride = partial_stride(kRingSlotBytes, partials, operand.partial_size);
  const Slices chunks{operand.count, operand.count, stride};
  const uint32_t first = collective.first_chunk();

  const auto send_result = [&](uint32_t number, const Range& chunk) {
    copy_bytes(segment.gather_mailbox(me, number), operand.at(chunk.begin),
               chunk.count * operand.element_size);
    mine.gather_sent.raise(number + 1);
  };
  const auto reduce = [&](size_t i) {
    const uint32_t number = first + static_cast<uint32_t>(i);
    const Range chunk = chunks(0, i);
    std::byte* data = operand.at(chunk.begin);
    if (me != 0) collective.wait(reduced_before, number + 1, before);
    const std::byte* arrived = segment.reduce_mailbox(before, number);
    if (me == last) {
      operand.kernels.finish(data, arrived, data, last + 1, stride, chunk.count);
      send_result(number, chunk);
    } else {
      operand.kernels.accumulate(segment.reduce_mailbox(me, number), arrived, data, me, stride,
                                 chunk.count);
      mine.reduce_sent.raise(number + 1);
    }
    return true;
  };
  const auto gather = [&](size_t i) {
    if (me == last) return true;
    const uint32_t number = first + static_cast<uint32_t>(i);
    const Range chunk = chunks(0, i);
    collective.wait(gathered_before, number + 1, before);
    copy_bytes(operand.at(chunk.begin), segment.gather_mailbox(before, number),
               chunk.count * operand.element_size);
    if (me != last - 1) send_result(number, chunk);
    return true;
  };
  // The result of a chunk reaches rank 0 after the chunk has passed all ranks.
  const int lag = std::min(collective.world_size(), kRingDepth - 1);
  ring_schedule(chunks.blocks(), lag, reduce, gather);
  collective.finish_chunks(chunks.blocks());

  collective.signal();
  collective.wait();
}

}  // namespace

Algorithm choose_algorithm(size_t bytes, const Communicator& communicator) {
  const size_t measured = communicator.one_shot_bytes();
  const size_t limit = measured != 0 ? measured : one_shot_bytes(communicator.world_size());
  return bytes <= limit ? Algorithm::kOneShot : Algorithm::kTwoShot;
}

void all_reduce(Communicator& communicator, void* data, size_t count, DType dtype,
                Reduction reduction, Algorithm algorithm, uint32_t shape) {
  check_reducible(dtype, reduction);
  const Operand operand{static_cast<std::byte*>(data), count,     size_of(dtype),
                        partial_size_of(dtype),        reduction, reduce_kernels(dtype, reduction)};
  const Call call{Operation::kAllReduce, dtype, reduction, algorithm, 0, shape, count};
  const size_t bytes = count * operand.element_size;
  run_collective(communicator, call, data, bytes, [&](Collective& collective) {
    const int ranks = communicator.world_size();
    const bool is_auto = algorithm == Algorithm::kAuto;
    if (is_auto) algorithm = choose_algorithm(bytes, communicator);
    if (count == 0 || ranks == 1) {
      collective.signal();
      collective.wait();
    } else if (is_auto && algorithm == Algorithm::kOneShot && ranks <= kFewRanks &&
               bytes <= kStagingBytes) {
      one_shot_or_in_place(collective, operand);
    } else if (algorithm == Algorithm::kOneShot) {
      one_shot(collective, operand);
    } else if (algorithm == Algorithm::kTwoShot) {
      two_shot(collective, operand);
    } else {
      ring(collective, operand);
    }
  });
}

}  // namespace pipekernels
