// The order in which a rank takes the steps of a ring all-reduce.
#pragma once

#include <cstddef>

#include "pipekernels/host/host_device.h"

namespace pipekernels {

// Calls reduce(i) for every chunk i in order, and gather(i) for every chunk, `lag` chunks later,
// until one of them returns false; whether none has.
//
// reduce(i) waits for reduce(i) of the rank before; gather(i) waits for gather(i) of the rank
// before, or on rank 0 for reduce(i) of the last rank. This cannot deadlock: give reduce(i) the
// time 2i and gather(i) the time 2(i + lag) + 1; then every rank takes its steps in the order of
// time, and every wait is for an earlier time, or for the same step of the rank before, down to
// rank 0.
//
// A step hands its chunk on in a mailbox that has more than `lag` slots, and need not ask whether
// the slot is free, since chunk i - lag - 1 has been taken: reduce(i) of any rank follows reduce(i)
// of rank 0, hence gather(i - lag - 1) of rank 0, hence reduce(i - lag - 1) of all ranks; gather(i)
// of any rank follows reduce(i) of all ranks, hence gather(i - lag - 1) of all.
template <class Reduce, class Gather>
PK_HOST_DEVICE bool ring_schedule(size_t chunks, size_t lag, Reduce reduce, Gather gather) {
  for (size_t i = 0; i < chunks + lag; ++i) {
    if (i < chunks && !reduce(i)) return false;
    if (i >= lag && !gather(i - lag)) return false;
  }
  return true;
}

}  // namespace pipekernels
