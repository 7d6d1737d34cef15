// Runs a function on every rank; ranks are threads of this process or forked processes.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "pipekernels/collectives/communicator.h"

namespace pipekernels {

using RankBody = std::function<void(Communicator&)>;

inline std::atomic<int> threads_of_a_rank{1};  // For large copies and sums.

inline std::unique_ptr<Communicator> join(int fd, int world_size, int rank, std::vector<int> pidfds,
                                          Seconds timeout) {
  return std::make_unique<Communicator>(
      Segment::map(fd, world_size), rank, std::move(pidfds), timeout, [] {}, [] {}, [] {},
      [] { return threads_of_a_rank.load(); });
}

inline void run_threads(int world_size, const RankBody& body, Seconds timeout = Seconds(30)) {
  const int fd = Segment::create(world_size);
  const auto segment = Segment::map(fd, world_size);
  close(fd);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator communicator(
          segment, rank, {}, timeout, [] {}, [] {}, [] {}, [] { return threads_of_a_rank.load(); });
      body(communicator);
    });
  }
  for (auto& thread : threads) thread.join();
}

// A counter in memory that forked processes share.
class SharedCounter {
 public:
  SharedCounter()
      : count_(static_cast<std::atomic<int>*>(
            mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    CHECK(count_ != MAP_FAILED);
  }
  void add() const { ++*count_; }
  void wait_for(int count) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (*count_ < count) {
      CHECK(std::chrono::steady_clock::now() < end);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::atomic<int>* const count_;
};

// Every rank must exit with status 0, except `killed`, which must be terminated by a signal.
inline void run_processes(int world_size, const RankBody& body, Seconds timeout = Seconds(30),
                          int killed = -1) {
  const int fd = Segment::create(world_size);
  // One more element counts the ranks that have opened their pidfds. No rank may end before all
  // have.
  const size_t bytes = (world_size + 1) * sizeof(pid_t);
  auto* pids = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  CHECK(pids != MAP_FAILED);
  std::vector<pid_t> children(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      std::vector<int> pidfds(world_size, -1);
      for (int peer = 0; peer < world_size; ++peer) {
        while (pids[peer].load() == 0) std::this_thread::yield();
        if (peer != rank) pidfds[peer] = syscall(SYS_pidfd_open, pids[peer].load(), 0);
        CHECK(peer == rank || pidfds[peer] >= 0);
      }
      ++pids[world_size];
      while (pids[world_size].load() < world_size) std::this_thread::yield();
      body(*join(fd, world_size, rank, pidfds, timeout));
      _exit(0);
    }
    children[rank] = pid;
  }
  close(fd);
  for (int rank = 0; rank < world_size; ++rank) pids[rank].store(children[rank]);
  for (int rank = 0; rank < world_size; ++rank) {
    int status = 0;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    CHECK(rank == killed ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  munmap(pids, bytes);
}

}  // namespace pipekernels
