// The ring's schedule takes every step once and in order, and does not deadlock.

#include "pipekernels/collectives/ring_schedule.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "check.h"

namespace {

enum Kind { kReduce, kGather };
using Step = std::pair<Kind, int>;

std::vector<Step> steps_of(int chunks, int lag) {
  std::vector<Step> steps;
  pipekernels::ring_schedule(
      chunks, lag,
      [&](size_t i) {
        steps.push_back({kReduce, int(i)});
        return true;
      },
      [&](size_t i) {
        steps.push_back({kGather, int(i)});
        return true;
      });
  return steps;
}

void test_order(int chunks, int lag) {
  std::map<Kind, int> next;
  for (const auto& [kind, chunk] : steps_of(chunks, lag)) {
    CHECK(chunk == next[kind]++);
    CHECK(kind == kReduce || next[kReduce] == std::min(chunks, chunk + lag + 1));
  }
  CHECK(next[kReduce] == chunks && next[kGather] == chunks);
}

// No step is taken after one that returns false.
void test_stop(size_t stop) {
  size_t steps = 0;
  const auto step = [&](size_t) { return steps++ != stop; };
  CHECK(pipekernels::ring_schedule(5, 2, step, step) == (stop >= 10));
  CHECK(steps == std::min<size_t>(stop + 1, 10));
}

// Runs all ranks, always preferring the first that can move, counted from rank `first`. No rank may
// get stuck, and none may overwrite a mailbox slot that its reader still needs.
void test_run(int ranks, int chunks, int lag, int first) {
  const int depth = lag + 1;
  const int last = ranks - 1;
  const std::vector<Step> steps = steps_of(chunks, lag);
  std::vector<size_t> position(ranks, 0);
  std::vector<int> done[2] = {std::vector<int>(ranks, 0), std::vector<int>(ranks, 0)};
  const auto can_run = [&](int rank) {
    const auto [kind, i] = steps[position[rank]];
    if (kind == kReduce) return rank == 0 || done[kReduce][rank - 1] > i;
    if (rank == last) return true;
    return rank == 0 ? done[kReduce][last] > i : done[kGather][rank - 1] > i;
  };
  const auto check_slot = [&](int rank) {
    const auto [kind, i] = steps[position[rank]];
    if (kind == kReduce) {
      const int taken = rank == last ? done[kGather][0] : done[kReduce][rank + 1];
      CHECK(taken > i - depth);
    } else if (rank < last - 1) {
      CHECK(done[kGather][rank + 1] > i - depth);
    }
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int k = 0; k < ranks && !moved; ++k) {
      const int rank = (first + k) % ranks;
      while (position[rank] < steps.size() && can_run(rank)) {
        check_slot(rank);
        ++done[steps[position[rank]].first][rank];
        ++position[rank];
        moved = true;
      }
    }
  }
  for (int rank = 0; rank < ranks; ++rank) CHECK(position[rank] == steps.size());
}

}  // namespace

int main() {
  for (int chunks = 0; chunks < 30; ++chunks) {
    for (int lag = 0; lag < 10; ++lag) test_order(chunks, lag);
  }
  for (size_t stop = 0; stop < 12; ++stop) test_stop(stop);
  for (int ranks = 2; ranks <= 9; ++ranks) {
    for (int lag = 0; lag < 8; ++lag) {
      for (int chunks = 0; chunks < 25; ++chunks) {
        for (int first = 0; first < ranks; ++first) test_run(ranks, chunks, lag, first);
      }
    }
  }
  return 0;
}
