#include <algorithm>

#include "algorithms.h"
#include "pipekernels/collectives/ring_schedule.h"
#include "pipekernels/collectives/slices.h"
#include "pipekernels/elements/copy.h"
#include "pipekernels/elements/tree_order.h"

namespace pipekernels {

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

}  // namespace pipekernels
