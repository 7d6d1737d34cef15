// Tree order: the order in which kTreeSum and kTreeAvg add terms.
//
// Terms are pushed on a stack, in rank order. After term i, the two top entries are replaced by
// their sum (left + right) once for every trailing 1 bit of i; after the last term, until one entry
// is left. So after term i the stack has an entry for every 1 bit of i + 1: the sum of that many
// consecutive terms.
//
//   8 terms: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
//   6 terms: ((0 + 1) + (2 + 3)) + (4 + 5)
//   3 terms: (0 + 1) + 2, as in rank order; so are fewer.
//
// Any 2^k consecutive terms from a multiple of 2^k on are a subtree. So ranks that each add up 2^k
// terms in tree order, and then their sums in tree order, get the same bits as a rank per term.
#pragma once

#include <cstddef>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/host_device.h"

namespace pipekernels {

// The order in which `terms` terms are combined; kRank where both are the same.
PK_HOST_DEVICE constexpr Order order_of(Reduction reduction, int terms) {
  return is_tree(reduction) && terms > 3 ? Order::kTree : Order::kRank;
}

// How many partial results a chain has after `terms` terms: one, or in tree order the stack.
PK_HOST_DEVICE constexpr int partials_after(int terms, Reduction reduction) {
  if (!is_tree(reduction)) return terms > 0 ? 1 : 0;
  int partials = 0;
  for (; terms > 0; terms /= 2) partials += terms % 2;
  return partials;
}

// The most partial results that a rank passes on in a chain of `ranks` ranks, at least 2.
PK_HOST_DEVICE constexpr int most_partials(int ranks, Reduction reduction) {
  if (!is_tree(reduction)) return 1;
  int most = 0;
  for (; ranks > 1; ranks /= 2) ++most;
  return most;
}

// The distance, in elements, between the partial results that share a slot of `slot_bytes`: a
// multiple of 128 bytes, so that whole vectors can be stored. Chunks have at most so many elements.
PK_HOST_DEVICE constexpr size_t partial_stride(size_t slot_bytes, int partials,
                                               size_t partial_size) {
  return slot_bytes / partials / 128 * 128 / partial_size;
}

}  // namespace pipekernels
