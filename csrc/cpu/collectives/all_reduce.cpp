#include "pipekernels/collectives/all_reduce.h"

#include <tuple>

#include "all_reduce/algorithms.h"
#include "pipekernels/collectives/broadcast.h"

namespace pipekernels {
namespace {

// More ranks than this often share cores, which makes a step slow.
constexpr int kFewRanks = 4;

}  // namespace

Algorithm choose_algorithm(size_t bytes, int ranks) {
  // Up to this size, one_shot (one step, n reads) beats two_shot.
  const size_t limit = ranks <= kFewRanks ? 2 << 10 : 16 << 10;
  return bytes <= limit ? Algorithm::kOneShot : Algorithm::kTwoShot;
}

namespace {

void run(Communicator& communicator, void* data, const Call& call) {
  const auto [dtype, reduction, count] = std::tuple(call.dtype, call.reduction, call.count);
  const Operand operand{static_cast<std::byte*>(data), count,     size_of(dtype),
                        partial_size_of(dtype),        reduction, reduce_kernels(dtype, reduction)};
  const size_t bytes = count * operand.element_size;
  Algorithm algorithm = call.algorithm;
  run_collective(communicator, call, data, bytes, [&](Collective& collective) {
    const int ranks = communicator.world_size();
    const bool is_auto = algorithm == Algorithm::kAuto;
    if (is_auto) algorithm = choose_algorithm(bytes, ranks);
    if (count == 0 || ranks == 1) {
      collective.signal();
      collective.wait();
    } else if (is_auto && algorithm == Algorithm::kOneShot && ranks <= kFewRanks) {
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

}  // namespace

void all_reduce(Communicator& communicator, void* data, size_t count, DType dtype,
                Reduction reduction, Algorithm algorithm, uint32_t shape) {
  run(communicator, data, {Operation::kAllReduce, dtype, reduction, algorithm, 0, shape, count});
}

void reduce(Communicator& communicator, void* data, size_t count, DType dtype, Reduction reduction,
            int root) {
  check_root(root, communicator.world_size());
  run(communicator, data,
      {Operation::kReduce, dtype, reduction, {}, static_cast<uint32_t>(root), 0, count});
}

}  // namespace pipekernels
