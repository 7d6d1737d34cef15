#include "pipekernels/all_reduce.h"

#include <algorithm>
#include <vector>

#include "pipekernels/copy.h"
#include "pipekernels/reduce.h"
#include "pipekernels/ring_schedule.h"
#include "pipekernels/slices.h"

namespace pipekernels {
namespace {

// More than these tend to share cores, where a step takes long.
constexpr int kFewRanks = 4;

// Up to how many bytes one step and n reads beat two steps, where nobody has measured that.
constexpr size_t one_shot_bytes(int ranks) { return ranks <= kFewRanks ? 4 << 10 : 16 << 10; }

// A rank that reduces straight into its peers' memory does so in blocks that stay in its L1.
constexpr size_t kPushBytes = 8 << 10;

// The tensor of this rank, and what is to be done with it.
struct Task {
  std::byte* data;
  size_t count;
  size_t element_size;
  size_t partial_size;
  const ReduceKernels& kernels;

  std::byte* at(size_t element) const { return data + element * element_size; }
};

// Every rank copies its tensor to its staging, and reduces those of all ranks.
//
// A set of input buffers is rewritten two rounds later. A rank does that after it has waited for
// the signals of the round between, which its peers make after having read the set.
void one_shot(Collective& collective, const Task& task) {
  const Slices chunks{task.count, task.count, kStagingBytes / task.element_size};
  const auto copy_in = [&](size_t k) {
    const Range chunk = chunks(0, k);
    copy_bytes(collective.input(collective.rank(), k), task.at(chunk.begin),
               chunk.count * task.element_size);
  };
  const int terms = collective.world_size();
  std::vector<const void*> sources(terms);
  const size_t rounds = chunks.blocks();
  for (size_t k = 0; k < rounds; ++k) {
    copy_in(k);
    collective.signal();
    collective.wait();
    for (int rank = 0; rank < terms; ++rank) sources[rank] = collective.input(rank, k);
    const Range chunk = chunks(0, k);
    task.kernels.reduce(task.at(chunk.begin), sources.data(), terms, chunk.count);
  }
  collective.finish_rounds(rounds);
}

// Every rank reduces its slice, reading all peers' tensors and writing into them: 2 bytes of
// traffic per rank and byte of the tensor.
void two_shot_in_place(Collective& collective, const Task& task) {
  const int terms = collective.world_size();
  const Slices slices =
      Slices::even(task.count, terms, task.element_size, kPushBytes / task.element_size);
  std::vector<const void*> sources(terms);
  for (size_t k = 0; k < slices.blocks(); ++k) {
    const Range block = slices(collective.rank(), k);
    const size_t offset = block.begin * task.element_size;
    for (int rank = 0; rank < terms; ++rank) sources[rank] = collective.data_of(rank) + offset;
    task.kernels.reduce(task.data + offset, sources.data(), terms, block.count);
    for (int rank = 0; rank < terms; ++rank) {
      if (rank == collective.rank()) continue;
      copy_bytes(collective.data_of(rank) + offset, task.data + offset,
                 block.count * task.element_size);
    }
  }
  collective.signal();
  collective.wait();
}

// One block, of few ranks: as one_shot(), which is one step, but in place where all tensors can be
// accessed there, whose two steps then are faster. So those tensors are not copied in. Where only
// some can be, all ranks wait until these have been read before their result is put there.
void one_shot_or_in_place(Collective& collective, const Task& task) {
  const int terms = collective.world_size();
  const size_t bytes = task.count * task.element_size;
  if (!collective.direct()) copy_bytes(collective.input(collective.rank(), 0), task.data, bytes);
  collective.signal();
  collective.wait();
  const int in_place = collective.direct_ranks();
  if (in_place == terms) return two_shot_in_place(collective, task);
  std::vector<const void*> sources(terms);
  for (int rank = 0; rank < terms; ++rank) {
    const std::byte* data = collective.data_of(rank);
    sources[rank] = data ? data : collective.input(rank, 0);
  }
  std::byte* result = collective.direct() ? collective.result(collective.rank(), 0) : task.data;
  task.kernels.reduce(result, sources.data(), terms, task.count);
  if (in_place > 0) {
    collective.signal();
    collective.wait();
    copy_bytes(task.data, result, bytes);
  }
  collective.finish_rounds(1);
}

// Every rank reduces its slice, block by block, and collects those of its peers. Round k is
//
//   copy_in(k)  the blocks that peers reduce to this rank's input buffers;
//   signal, wait;
//   reduce(k)   its own block, to the tensor and to its result buffer;
//   signal, wait;
//   gather(k)   its peers' results into the tensor.
//
// Rounds overlap: one signal S_k says that input k and result k - 1 are ready.
//
//   copy_in(0) S_0 | wait S_k, reduce(k), copy_in(k+1), S_k+1, gather(k-1) | ... wait, gather(last)
//
// Two sets of input buffers suffice: copy_in(k+2) comes after wait S_k+1, which peers make after
// reduce(k). It takes three of results: reduce(k+3) comes after wait S_k+3, which peers make after
// gather(k); they may still be in gather(k) at S_k+2. Both hold across calls, since rounds are
// counted through and a rank leaves a call only after all have made its last signal.
//
// A rank whose tensor its peers can read copies nothing in: they read it in place, and gather(k)
// overwrites only what they have read before S_k+1.
void two_shot(Collective& collective, const Task& task) {
  const int me = collective.rank();
  const int terms = collective.world_size();
  const size_t size = task.element_size;
  const size_t block_size = kStagingBytes / terms / 64 * 64;
  const Slices slices = Slices::even(task.count, terms, size, block_size / size);
  const size_t rounds = slices.blocks();

  const auto copy_in = [&](size_t k) {
    if (collective.direct() || k >= rounds) return;
    for (int rank = 0; rank < terms; ++rank) {
      if (rank == me) continue;
      const Range block = slices(rank, k);
      copy_bytes(collective.input(me, k) + rank * block_size, task.at(block.begin),
                 block.count * size);
    }
  };
  std::vector<const void*> sources(terms);
  const auto reduce = [&](size_t k) {
    const Range block = slices(me, k);
    const Slices parts{block.count, block.count, kPushBytes / size};  // copied from the L1
    for (size_t i = 0; i < parts.blocks(); ++i) {
      const Range part = parts(0, i);
      std::byte* data = task.at(block.begin + part.begin);
      for (int rank = 0; rank < terms; ++rank) {
        const std::byte* whole = rank == me ? task.data : collective.data_of(rank);
        const std::byte* staged = collective.input(rank, k) + me * block_size;
        sources[rank] = whole ? whole + (data - task.data) : staged + part.begin * size;
      }
      task.kernels.reduce(data, sources.data(), terms, part.count);
      copy_bytes(collective.result(me, k) + part.begin * size, data, part.count * size);
    }
  };
  const auto gather = [&](size_t k) {
    for (int rank = 0; rank < terms; ++rank) {
      if (rank == me) continue;
      const Range block = slices(rank, k);
      copy_bytes(task.at(block.begin), collective.result(rank, k), block.count * size);
    }
  };

  copy_in(0);
  collective.signal();
  collective.wait();
  if (collective.direct_ranks() == terms) return two_shot_in_place(collective, task);
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

// Every rank talks to its two neighbours alone. Partial sums of a chunk travel from rank 0 to rank
// n - 1, which keeps the rank order; the result travels on from there, to rank 0 and up to n - 2.
// All ranks work on different chunks at a time, in the order of ring_schedule.h. A chunk's number
// counts through all calls, as the signals do.
void ring(Collective& collective, const Task& task) {
  collective.signal();
  collective.wait();

  Segment& segment = collective.segment();
  const int me = collective.rank();
  const int last = collective.world_size() - 1;
  const int before = me == 0 ? last : me - 1;
  RankState& mine = segment.state(me);
  Signal& reduced_before = segment.state(before).reduce_sent;
  Signal& gathered_before = segment.state(before).gather_sent;
  const Slices chunks{task.count, task.count, kRingSlotBytes / task.partial_size};
  const uint32_t first = collective.first_chunk();

  const auto send_result = [&](uint32_t number, const Range& chunk) {
    copy_bytes(segment.gather_mailbox(me, number), task.at(chunk.begin),
               chunk.count * task.element_size);
    mine.gather_sent.raise(number + 1);
  };
  const auto reduce = [&](size_t i) {
    const uint32_t number = first + static_cast<uint32_t>(i);
    const Range chunk = chunks(0, i);
    std::byte* data = task.at(chunk.begin);
    if (me != 0) collective.wait(reduced_before, number + 1, before);
    const std::byte* partial = me == 0 ? nullptr : segment.reduce_mailbox(before, number);
    if (me == last) {
      task.kernels.finish(data, partial, data, last + 1, chunk.count);
      send_result(number, chunk);
    } else {
      task.kernels.accumulate(segment.reduce_mailbox(me, number), partial, data, chunk.count);
      mine.reduce_sent.raise(number + 1);
    }
    return true;
  };
  const auto gather = [&](size_t i) {
    if (me == last) return true;
    const uint32_t number = first + static_cast<uint32_t>(i);
    const Range chunk = chunks(0, i);
    collective.wait(gathered_before, number + 1, before);
    copy_bytes(task.at(chunk.begin), segment.gather_mailbox(before, number),
               chunk.count * task.element_size);
    if (me != last - 1) send_result(number, chunk);
    return true;
  };
  // A result is due at rank 0 when the chunk has passed all ranks.
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
  const Task task{static_cast<std::byte*>(data), count, size_of(dtype), partial_size_of(dtype),
                  reduce_kernels(dtype, reduction)};
  const Call call{Operation::kAllReduce, dtype, reduction, algorithm, 0, shape, count};
  const size_t bytes = count * task.element_size;
  run_collective(communicator, call, data, bytes, [&](Collective& collective) {
    const int ranks = communicator.world_size();
    const bool is_auto = algorithm == Algorithm::kAuto;
    if (is_auto) algorithm = choose_algorithm(bytes, communicator);
    if (count == 0 || ranks == 1) {
      collective.signal();
      collective.wait();
    } else if (is_auto && algorithm == Algorithm::kOneShot && ranks <= kFewRanks &&
               bytes <= kStagingBytes) {
      one_shot_or_in_place(collective, task);
    } else if (algorithm == Algorithm::kOneShot) {
      one_shot(collective, task);
    } else if (algorithm == Algorithm::kTwoShot) {
      two_shot(collective, task);
    } else {
      ring(collective, task);
    }
  });
}

}  // namespace pipekernels
