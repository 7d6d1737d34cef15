// CUDA communicators on the fake CUDA runtime of CPU threads: mismatches, late and lost ranks,
// shutdown, forks.

#include "cuda_rank.h"

namespace pipekernels {
namespace {

// ---- failures
void call_differently(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(20, 1.0f);
  rank.all_reduce(data.data(), 20);
  const std::string told = thrown<MismatchError>([&] {
    rank.all_reduce(data.data(), 10 + rank.number());
    rank.cuda.synchronize();
  });
  CHECK(has(told, "rank 0 all_reduce(10 x float32") && has(told, "rank 1 all_reduce(11 x"));
  if (core.is_threads()) {  // Found before the launch.
    rank.all_reduce(data.data(), 20);
    rank.cuda.synchronize();
    CHECK(all_are(data.data(), 20, 4.0f));
  } else {
    CHECK(has(thrown<std::runtime_error>([&] { rank.cuda.check(); }), "after a failure"));
  }
}

// One rank calls on the CPU, the other on CUDA. The CPU's collective must not use the stream that
// the other rank publishes as the address of data.
void mix_devices(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(20, rank.number() + 1.0f);
  const std::string told = thrown<MismatchError>([&] {
    if (rank.number() == 1) return rank.all_reduce(data.data(), 20);
    all_reduce(core, data.data(), 20, DType::kFloat32, Reduction::kSum, Algorithm::kTwoShot);
  });
  CHECK(has(told, "rank 1 all_reduce(20 x float32, sum, two_shot), but not all of them on CUDA"));
  rank.all_reduce(data.data(), 20);
  rank.cuda.synchronize();
  CHECK(all_are(data.data(), 20, rank.sum()));
}

void share_a_stream(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(20, rank.number() + 1.0f);
  const std::string told = thrown<MismatchError>(
      [&] { rank.all_reduce_in(nullptr, data.data(), 20, Algorithm::kOneShot); });
  CHECK(has(told, "ranks 0 and 1 are threads that use the same CUDA stream"));
  rank.all_reduce(data.data(), 20);
  rank.cuda.synchronize();
  CHECK(all_are(data.data(), 20, rank.sum()));
}

void be_late(Communicator& core, const SharedCounter& given_up) {
  Rank rank(core);
  std::vector<float> data(20'000, 1.0f);
  rank.all_reduce(data.data(), data.size());
  rank.cuda.synchronize();
  if (rank.number() == 1) given_up.wait_for(1);
  const std::string told = thrown<TimeoutError>([&] {
    rank.all_reduce(data.data(), data.size());
    rank.cuda.synchronize();
  });
  given_up.add();
  CHECK(has(told, rank.number() == 1 ? "rank 1 did not arrive in time, as rank 0 has noticed"
                                     : "rank 1 of 2 did not arrive at all_reduce(20000 x float32"));
  rank.stream->drain();  // The error may be known before all is poisoned.
  for (const float value : data) CHECK(value != value);
  CHECK(has(thrown<std::runtime_error>([&] { rank.cuda.check(); }), "after a failure"));
}

// On one rank the launch fails after the kernels of others have been launched.
void fail_to_launch(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(20'000, 1.0f);
  const size_t count = data.size();
  const Call call{Operation::kAllReduce, DType::kFloat32, {}, Algorithm::kTwoShot, 0, 0, count};
  const DeviceLaunch launch =
      plan_all_reduce(rank.cuda.ranks(), call, call.algorithm, data.data(), 0);
  const Kernel broken{sizeof(DeviceLaunch), nullptr, true};
  if (rank.number() == 1) {
    const std::string told =
        thrown<std::runtime_error>([&] { rank.cuda.launch(&broken, launch, {rank.stream, true}); });
    CHECK(has(told, "launching a collective failed"));
    return;
  }
  const std::string told =
      thrown<PeerError>([&] { rank.cuda.launch(&two_shot_kernel, launch, {rank.stream, true}); });
  CHECK(has(told, "rank 1 gave up after an error of its own"));
  const auto begin = Clock::now();
  rank.cuda.close(false);
  CHECK(Clock::now() - begin <
        std::chrono::seconds(20));  // Its kernel does not wait for 30 s either.
  // All poisoned, or unchanged if the other rank failed before this rank's launch.
  CHECK(all_are(data.data(), count, 1.0f) ||
        std::all_of(data.begin(), data.end(), [](float value) { return value != value; }));
}

enum class Leave { kDie, kClose, kAbort };

void lose_rank_1(Communicator& core, Leave how, Algorithm way) {
  Rank rank(core);
  std::vector<float> data(way == Algorithm::kOneShot ? 5'000 : 20'000, 1.0f);
  rank.all_reduce(data.data(), data.size(), way);
  rank.cuda.synchronize();
  if (rank.number() == 1) {
    if (how == Leave::kDie) raise(SIGKILL);
    rank.cuda.close(how == Leave::kAbort);
    how == Leave::kAbort ? core.abort() : core.close();
    return;
  }
  const auto begin = Clock::now();
  try {
    while (true) {
      rank.all_reduce(data.data(), data.size(), way);
      rank.cuda.synchronize();
    }
  } catch (const PeerError& error) {
    CHECK(error.rank == 1);
    CHECK(has(error.what(), how == Leave::kDie     ? "rank 1 has died"
                            : how == Leave::kClose ? "rank 1 has closed its communicator"
                                                   : "rank 1 gave up after an error of its own"));
  }
  CHECK(Clock::now() - begin < std::chrono::seconds(20));  // Before the timeout of 30 s.
}

// ---- shutdown
// Memory that a peer still has mapped is freed by the next allocation after the peer has unmapped
// it.
void keep_mapped_memory(Communicator& core, const SharedCounter& closed) {
  Rank rank(core);
  auto& memory = fake_cuda::device().memory;
  if (rank.number() == 1) closed.wait_for(1);
  rank.cuda.close(false);
  CHECK(memory.size() == (rank.number() == 0 ? 1 : 0));
  closed.add();
  barrier(core);
  const DeviceMemory next(0, 4096, nullptr, rank.number());
  CHECK(memory.size() == 1 && memory.count(next.base()) == 1);
}

// A process that this one may not signal lives as well as any.
void be_mapped_by_another_user(Communicator& core) {
  const DeviceMemory memory(0, 4096, core.segment(), 1);
  if (geteuid() == 0) CHECK(setuid(65534) == 0);
  CHECK(!memory.is_mapped());
  core.segment()->state(0).device_mapper.store(1);  // Of the superuser, or of this container.
  CHECK(memory.is_mapped());
}

// Forks while another thread, which the child does not have, is in a call.
void fork_a_child(Communicator& core, const SharedCounter& forked) {
  auto rank = std::make_unique<Rank>(core);
  std::vector<float> data(1000, rank->number() + 1.0f);
  if (rank->number() == 1) {
    forked.wait_for(1);
    rank->all_reduce(data.data(), data.size());
    rank->cuda.synchronize();
    return;
  }
  rank->all_reduce(data.data(), data.size());
  std::thread waiting([&] { rank->cuda.synchronize(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const pid_t child = fork();
  if (child == 0) {
    const bool told = has(thrown<std::runtime_error>([&] { rank->cuda.check(); }), "forked child");
    rank->cuda.close(false);
    rank.reset();
    _exit(told ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  forked.add();
  waiting.join();
  CHECK(all_are(data.data(), data.size(), rank->sum()));
}

void test_processes() {
  run_processes(2, call_differently);
  const SharedCounter given_up;
  run_processes(2, [&](Communicator& core) { be_late(core, given_up); }, Seconds(3));
  for (const Leave how : {Leave::kDie, Leave::kClose, Leave::kAbort}) {
    const Algorithm way = how == Leave::kDie ? Algorithm::kOneShot : Algorithm::kTwoShot;
    const auto body = [=](Communicator& core) { lose_rank_1(core, how, way); };
    run_processes(3, body, Seconds(30), how == Leave::kDie ? 1 : -1);
  }
  const SharedCounter closed;
  run_processes(2, [&](Communicator& core) { keep_mapped_memory(core, closed); });
  run_processes(1, be_mapped_by_another_user);
  const SharedCounter forked;
  run_processes(2, [&](Communicator& core) { fork_a_child(core, forked); });
}

void test_threads() {
  run_threads(2, call_differently);
  run_threads(2, mix_devices);
  run_threads(2, share_a_stream);
  run_threads(2, fail_to_launch);
  for (const Leave how : {Leave::kClose, Leave::kAbort}) {
    run_threads(2, [how](Communicator& core) { lose_rank_1(core, how, Algorithm::kOneShot); });
  }
  const auto& device = fake_cuda::device();
  CHECK(device.memory.empty() && device.pinned.empty() && device.events.empty());
}

}  // namespace
}  // namespace pipekernels

int main() {
  pipekernels::test_processes();  // First, since a process with threads must not fork.
  pipekernels::test_threads();
}
