// Parallel loops run every piece once, several at the same time, and after a fork on one thread.
#include "pipekernels/host/parallel_for.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "openmp.h"

namespace {

using namespace pipekernels;

void test_every_piece_once() {
  for (int round = 0; round < 500; ++round) {
    std::vector<int> seen(round % 37, 0);
    parallel_for(static_cast<int64_t>(seen.size()), 1 + round % 5, [&](int64_t i) { ++seen[i]; });
    for (const int times : seen) CHECK(times == 1);
  }
}

// Whether two pieces run at the same time: each waits for the other to begin.
bool runs_concurrently() {
  std::atomic<int> begun{0}, met{0};
  parallel_for(2, 2, [&](int64_t) {
    ++begun;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (begun < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    if (begun == 2) ++met;
  });
  return met == 2;
}

// Whether the calling thread runs all pieces, as in a forked child, which has no other thread.
bool runs_on_caller_alone() {
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<int> seen(100, 0);
  bool alone = true;
  parallel_for(static_cast<int64_t>(seen.size()), 4, [&](int64_t i) {
    ++seen[i];
    alone = alone && std::this_thread::get_id() == caller;
  });
  return alone && std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; });
}

void test_fork() {
  CHECK(runs_concurrently());
  const pid_t child = fork();
  if (child == 0) _exit(runs_on_caller_alone() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(runs_concurrently());
}

}  // namespace

int main() {
  test_every_piece_once();
  test_fork();
}
