#include "pipekernels/collectives/all_reduce.h"

#include <algorithm>
#include <vector>

#include "pipekernels/collectives/ring_schedule.h"
#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {
namespace {

// More than these tend to share cores, where a step takes long.
constexpr int kFewRanks = 4;

// Up to how many bytes one step and n reads beat two steps, where nobody has measured that.
constexpr size_t one_shot_bytes(int ranks) { return ranks <= kFewRanks ? 2 << 10 : 16 << 10; }

// The tensor of this rank, and what is to be done with it.
struct Task {
  std::byte* data;
  size_t count;
  size_t element_size;
  size_t partial_size;
  const ReduceKernels& kernels;

  std::byte* at(size_t element) const { return data + element * element_size; }

  void reduce(void* destination, const std::vector<const void*>& sources, size_t elements) const {
    kernels.reduce(destination, sources.data(), static_cast<int>(sources.size()), elements);
  }
  void reduce_in_place(const std::vector<void*>& tensors, int rank, size_t elements) const {
    kernels.reduce_in_place(tensors.data(), static_cast<int>(tensors.size()), rank, elements);
  }
};

// Every rank copies its tensor to its staging, and reduces those of all ranks.
void one_shot(Collective& collective, const Task& task) {
  const Slices chunks{task.count, task.count, kStagingBytes / task.element_size};
  const auto copy_in = [&](size_t k) {
    const Range chunk = chunks(0, k);
    copy_bytes(collective.staging(collective.rank(), k), task.at(chunk.begin),
               chunk.count * task.element_size);
  };
  const int terms = collective.world_size();
  std::vector<const void*> sources(terms);
  const size_t rounds = chunks.blocks();
  for (size_t k = 0; k < rounds; ++k) {
    copy_in(k);
    collective.signal();
    collective.wait();
    for (int rank = 0; rank < terms; ++rank) sources[rank] = collective.staging(rank, k);
    const Range chunk = chunks(0, k);
    task.reduce(task.at(chunk.begin), sources, chunk.count);
  }
  collective.finish_rounds(rounds);
}

// Every rank reduces its slice, reading all peers' tensors and writing into them: 2 bytes of
// traffic per rank and byte of the tensor.
void two_shot_in_place(Collective& collective, const Task& task) {
  const int terms = collective.world_size();
  const Range slice =
      Slices::even(task.count, terms, task.element_size, task.count).slice(collective.rank());
  std::vector<void*> data(terms);
  for (int rank = 0; rank < terms; ++rank) {
    data[rank] = collective.data_of(rank) + slice.begin * task.element_size;
  }
  task.reduce_in_place(data, collective.rank(), slice.count);
  collective.signal();
  collective.wait();
}

// One block, of few ranks: as one_shot(), which is one step, but in place where all tensors can be
// accessed there, whose two steps then are faster. So those tensors are not copied in. Where only
// some can be, all ranks wait until these have been read before their result is put there; until
// then it is in the staging of its rank, which has nothing else there.
void one_shot_or_in_place(Collective& collective, const Task& task) {
  const int terms = collective.world_size();
  const size_t bytes = task.count * task.element_size;
  if (!collective.direct()) copy_bytes(collective.staging(collective.rank(), 0), task.data, bytes);
  collective.signal();
  collective.wait();
  const int in_place = collective.direct_ranks();
  if (in_place == terms) return two_shot_in_place(collective, task);
  std::vector<const void*> sources(terms);
  for (int rank = 0; rank < terms; ++rank) {
    const std::byte* data = collective.data_of(rank);
    sources[rank] = data ? data : collective.staging(rank, 0);
  }
  std::byte* result = collective.direct() ? collective.staging(collective.rank(), 0) : task.data;
  task.reduce(result, sources, task.count);
  if (in_place > 0) {
    collective.signal();
    collective.wait();
    copy_bytes(task.data, result, bytes);
  }
  collective.finish_rounds(1);
  if (!collective.direct()) collective.prefetch_staging(bytes);
}

// Every rank reduces its slice, block by block, and the others collect it. Round k is
//
//   copy_in(k)  the blocks that peers reduce to this rank's staging;
//   signal, wait;
//   reduce(k)   its own block, to the tensor and to all peers' staging, in place of what they had
//               copied there: cores hand lines over that they have read and then write themselves,
//               but must ask for those that another one has read;
//   signal, wait;
//   gather(k)   the peers' results from this rank's staging to the tensor.
//
// Rounds overlap: one signal S_k says that inputs k and results k - 1 are ready.
//
//   copy_in(0) S_0 | wait S_k, reduce(k), copy_in(k+1), S_k+1, gather(k-1) | ... wait, gather(last)
//
// Peers use this rank's staging k between wait S_k and S_k+1, where gather(k) comes after wait
// S_k+1 and before copy_in(k+3), in program order: so there are three sets. That holds across
// calls, of all collectives, since rounds are counted through, no peer uses staging k after its
// S_k+2, and a rank leaves a call only after all have made its last signal.
//
// A rank whose tensor its peers can access copies nothing in or out: they read it in place, and
// put results there.
void two_shot(Collective& collective, const Task& task) {
  const int me = collective.rank();
  const int terms = collective.world_size();
  const size_t size = task.element_size;
  const size_t block_size = kStagingBytes / terms / 64 * 64;
  const Slices slices = Slices::even(task.count, terms, size, block_size / size);
  const size_t rounds = slices.blocks();

  // Calls copy(data, staged, bytes) for this rank's blocks of all peers' slices.
  const auto for_peers = [&](size_t k, auto copy) {
    if (collective.direct() || k >= rounds) return;
    for (int rank = 0; rank < terms; ++rank) {
      if (rank == me) continue;
      const Range block = slices(rank, k);
      copy(task.at(block.begin), collective.staging(me, k) + rank * block_size, block.count * size);
    }
  };
  const auto copy_in = [&](size_t k) {
    for_peers(k, [](void* data, void* staged, size_t bytes) { copy_bytes(staged, data, bytes); });
  };
  const auto gather = [&](size_t k) {
    for_peers(k, [](void* data, void* staged, size_t bytes) { copy_bytes(data, staged, bytes); });
  };
  std::vector<void*> terms_of_block(terms);
  const auto reduce = [&](size_t k) {
    const Range block = slices(me, k);
    for (int rank = 0; rank < terms; ++rank) {
      std::byte* whole = rank == me ? task.data : collective.data_of(rank);
      terms_of_block[rank] =
          whole ? whole + block.begin * size : collective.staging(rank, k) + me * block_size;
    }
    task.reduce_in_place(terms_of_block, me, block.count);
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
