// The order in which a rank takes the steps of a ring all-reduce.
#pragma once

#include <cstddef>

#include "pipekernels/host/host_device.h"

namespace pipekernels {

// Calls reduce(i) for every chunk i in order, and gather(i) `lag` chunks later, until a call
// returns false. Returns whether all calls returned true.
//
// reduce(i) waits for reduce(i) of the previous rank; gather(i) waits for gather(i) of the previous
// rank, or on rank 0 for reduce(i) of the last rank. This cannot deadlock: give reduce(i) the time
// 2i and gather(i) the time 2(i + lag) + 1. Then every rank takes its steps in the order of time,
// and every wait is for a step of an earlier time, or for the same step of the previous rank, down
// to rank 0.
//
// A step passes its chunk on in a mailbox that has more than `lag` slots. It need not check whether
// the slot is free, since chunk i - lag - 1 has been taken out: reduce(i) of any rank follows
// reduce(i) of rank 0, hence gather(i - lag - 1) of rank 0, hence reduce(i - lag - 1) of all ranks;
// gather(i) of any rank follows reduce(i) of all ranks, hence gather(i - lag - 1) of all ranks.
template <class Reduce, class Gather>
PK_HOST_DEVICE bool ring_schedule(size_t chunks, size_t lag, Reduce reduce, Gather gather) {
  for (size_t i = 0; i < chunks + lag; ++i) {
    if (i < chunks && !reduce(i)) return false;
    if (i >= lag && !gather(i - lag)) return false;
  }
  return true;
}

}  // namespace pipekernels
