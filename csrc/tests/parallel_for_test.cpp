// Loops on torch's threads: every piece once, several at once, alone after a fork.
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

// Whether two pieces can run at the same time: each waits for the other to begin.
bool two_at_once() {
  std::atomic<int> begun{0}, met{0};
  parallel_for(2, 2, [&](int64_t) {
    ++begun;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (begun < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    if (begun == 2) ++met;
  });
  return met == 2;
}

// A child runs all pieces alone, on its only thread: the runtime counts on threads it has not.
bool alone_and_complete() {
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
  CHECK(two_at_once());
  const pid_t child = fork();
  if (child == 0) _exit(alone_and_complete() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(two_at_once());
}

}  // namespace

int main() {
  test_every_piece_once();
  test_fork();
}
