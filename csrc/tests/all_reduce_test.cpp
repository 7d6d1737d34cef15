// The collectives of the CPU on threads and on processes: values, mismatches and lost ranks.

#include "pipekernels/collectives/all_reduce.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>

#include "openmp.h"
#include "pipekernels/collectives/all_gather.h"
#include "pipekernels/collectives/broadcast.h"
#include "pipekernels/collectives/reduce_scatter.h"
#include "pipekernels/elements/reduce.h"
#include "pipekernels/host/fuzz.h"
#include "ranks.h"
#include "values.h"

namespace {

using namespace pipekernels;
constexpr DType kDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kInt64};

Bytes reduced(DType dtype, size_t count, uint64_t seed, int world_size, Reduction reduction) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < world_size; ++rank) inputs.push_back(values(dtype, count, seed, rank));
  return reduced(inputs, dtype, reduction);
}

// Memory that holds `contents`, symmetric or not, `shift` bytes after an aligned address.
class Buffer {
 public:
  Buffer(Communicator& communicator, bool symmetric, size_t shift, const Bytes& contents)
      : shift_(shift) {
    const size_t bytes = contents.size() + shift;
    if (symmetric) {
      symmetric_ = std::make_unique<SymmetricBuffer>(communicator.heap(), bytes);
    } else {
      ordinary_.resize(bytes);
    }
    if (!contents.empty()) std::memcpy(data(), contents.data(), contents.size());
  }
  std::byte* data() { return (symmetric_ ? symmetric_->data() : ordinary_.data()) + shift_; }

 private:
  const size_t shift_;
  std::unique_ptr<SymmetricBuffer> symmetric_;
  Bytes ordinary_;
};

// Makes a random call, the same on all ranks. Alignment, timing and whether the memory is symmetric
// differ between ranks.
void random_call(Communicator& communicator, uint64_t seed) {
  std::mt19937_64 shared(seed);
  std::mt19937_64 own(seed * 8 + communicator.rank());
  const int world_size = communicator.world_size();
  const int me = communicator.rank();
  const DType dtype = kDTypes[shared() % 4];
  const size_t size = size_of(dtype);
  Reduction reduction = static_cast<Reduction>(shared() % kReductions);
  if (!has_reduce_kernels(dtype, reduction)) reduction = Reduction::kSum;
  constexpr size_t limits[] = {4, 100, 3000, 200000, 1000000};
  const size_t count = shared() % limits[shared() % 5] / size;
  const int symmetric_ranks = shared() % 3;  // 0: none, 1: some, 2: all.
  const bool symmetric = symmetric_ranks == 2 || (symmetric_ranks == 1 && own() % 2);
  const size_t shift = own() % 5 * size;
  if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
  const auto kind = shared() % 11;
  const int root = shared() % world_size;

  if (kind < 4) {
    const auto algorithm = static_cast<Algorithm>(kind);
    Buffer buffer(communicator, symmetric, shift, values(dtype, count, seed, me));
    all_reduce(communicator, buffer.data(), count, dtype, reduction, algorithm);
    CHECK(equal(buffer.data(), reduced(dtype, count, seed, world_size, reduction)));
  } else if (kind == 4) {
    Buffer input(communicator, symmetric, shift, values(dtype, count * world_size, seed, me));
    Bytes output(count * size);
    reduce_scatter(communicator, input.data(), output.data(), count, dtype, reduction);
    const Bytes whole = reduced(dtype, count * world_size, seed, world_size, reduction);
    CHECK(equal(whole.data() + me * count * size, output));
  } else if (kind == 5) {
    Buffer input(communicator, symmetric, shift, values(dtype, count, seed, me));
    Bytes output(count * size * world_size), expected;
    all_gather(communicator, input.data(), output.data(), count, dtype);
    for (int rank = 0; rank < world_size; ++rank) {
      const Bytes part = values(dtype, count, seed, rank);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    CHECK(output == expected);
  } else if (kind == 6) {
    Buffer buffer(communicator, symmetric, shift, values(dtype, count, seed, me));
    broadcast(communicator, buffer.data(), count, dtype, root);
    CHECK(equal(buffer.data(), values(dtype, count, seed, root)));
  } else if (kind == 7) {
    Buffer buffer(communicator, symmetric, shift, values(dtype, count, seed, me));
    reduce(communicator, buffer.data(), count, dtype, reduction, root);
    if (me == root) CHECK(equal(buffer.data(), reduced(dtype, count, seed, world_size, reduction)));
  } else if (kind <= 9) {
    const auto operation = kind == 8 ? Operation::kGather : Operation::kAllToAll;
    const auto part = [&](int from, int to) {  // Of uneven sizes.
      const size_t bytes = operation == Operation::kGather ? (to == root) * count * size
                                                           : (from + 1) * count / (to + 1);
      Bytes made = values(DType::kInt64, bytes / 8 + 1, seed + to, from);
      made.resize(bytes);
      return made;
    };
    std::vector<Bytes> inputs, outputs;
    std::vector<Part> sent, received;
    for (int rank = 0; rank < world_size; ++rank) {
      inputs.push_back(part(me, rank));
      outputs.emplace_back(part(rank, me).size());
    }
    for (Bytes& each : inputs) sent.push_back({each.data(), each.size()});
    for (Bytes& each : outputs) received.push_back({each.data(), each.size()});
    exchange(communicator, {operation, dtype, {}, {}, uint32_t(root), 0, count}, sent, received);
    for (int rank = 0; rank < world_size; ++rank) CHECK(outputs[rank] == part(rank, me));
  } else {
    barrier(communicator);
  }
}

void stress(Communicator& communicator, uint64_t seed, int calls) {
  for (int i = 0; i < calls; ++i) random_call(communicator, seed * 100000 + i);
}

void test_mismatch(Communicator& communicator) {
  const int me = communicator.rank();
  std::vector<float> data(1000, 1.f);
  const auto reduce = [&](size_t count, DType dtype, Reduction reduction, Algorithm algorithm) {
    all_reduce(communicator, data.data(), count, dtype, reduction, algorithm);
  };
  const bool odd = me == 1;
  Call to_all;
  to_all.operation = Operation::kAllToAll;
  const std::function<void()> calls[] = {
      [&] { reduce(odd ? 999 : 1000, DType::kFloat32, Reduction::kSum, Algorithm::kAuto); },
      [&] { reduce(10, odd ? DType::kInt32 : DType::kFloat32, Reduction::kSum, Algorithm::kAuto); },
      [&] { reduce(10, DType::kFloat32, odd ? Reduction::kMax : Reduction::kSum, {}); },
      [&] { reduce(10, DType::kFloat32, odd ? Reduction::kTreeSum : Reduction::kSum, {}); },
      [&] { reduce(10, DType::kFloat32, {}, odd ? Algorithm::kRing : Algorithm::kTwoShot); },
      [&] { broadcast(communicator, data.data(), 10, DType::kFloat32, odd); },
      [&] { odd ? barrier(communicator) : reduce(10, DType::kFloat32, {}, {}); },
      [&] { odd ? barrier(communicator) : announce(communicator, to_all); },
      [&] {
        std::vector<float> copy(10 * communicator.world_size());
        if (odd) return all_gather(communicator, data.data(), copy.data(), 10, DType::kFloat32);
        const std::vector<Part> parts(communicator.world_size());
        exchange(communicator, to_all, parts, parts);
      },
  };
  for (const auto& call : calls) {
    const std::string message = expect<MismatchError>(call).what();
    CHECK(message.find("rank 0 ") != message.npos && message.find("rank 1 ") != message.npos);
    random_call(communicator, 7);  // All ranks are still in step.
  }
}

// If one rank makes no call, the others name it in a TimeoutError, and later calls fail at once.
void test_timeout(Communicator& communicator, const SharedCounter& failed) {
  const int absent = communicator.world_size() - 1;
  barrier(communicator);
  if (communicator.rank() == absent) {
    failed.wait_for(absent);
    expect<TimeoutError>([&] { barrier(communicator); });
    return;
  }
  const auto error = expect<TimeoutError>([&] { barrier(communicator); });
  CHECK(error.rank == absent);
  failed.add();
  expect<std::runtime_error>([&] { barrier(communicator); });
}

// The signal wakes a rank that sleeps in a wait, before its next check for failures, which comes
// every 20 ms. A few fast wake-ups of many suffice, since the machine may be busy.
void test_wake(Communicator& communicator) {
  using Clock = std::chrono::steady_clock;
  int woken = 0;
  for (int i = 0; i < 50; ++i) {
    barrier(communicator);
    const auto start = Clock::now();
    if (communicator.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    barrier(communicator);
    woken += Clock::now() - start < std::chrono::milliseconds(15);
  }
  CHECK(woken >= 5);
}

// After a call has failed, a late process may still write to the tensors that its peers published
// in it. The peers do not see these writes.
void test_late_writes(Communicator& communicator, const SharedCounter& steps) {
  constexpr size_t kCount = 5000;
  SymmetricBuffer buffer(communicator.heap(), kCount * sizeof(float));
  barrier(communicator);
  if (communicator.rank() == 1) {
    steps.wait_for(1);
    std::memset(buffer.data() - kHeapStride, 0xff, buffer.bytes());  // The same block of rank 0.
    return steps.add();
  }
  auto* data = reinterpret_cast<float*>(buffer.data());
  expect<TimeoutError>(
      [&] { all_reduce(communicator, data, kCount, DType::kFloat32, {}, Algorithm::kTwoShot); });
  std::fill_n(data, kCount, 5.f);
  steps.add();
  steps.wait_for(2);
  CHECK(std::count(data, data + kCount, 5.f) == kCount);
}

// Calls work while the counters of signals wrap around.
void test_wrap() {
  const int fd = Segment::create(2);
  const auto segment = Segment::map(fd, 2);
  close(fd);
  for (int rank = 0; rank < 2; ++rank) segment->state(rank).arrivals.raise(0u - 100);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator communicator(segment, rank, {}, Seconds(30), [] {});
      stress(communicator, 11, 100);
      CHECK(segment->state(rank).arrivals.own_value() < 1u << 31);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Write prefetches are on only for AMD, and do not change results on whichever ranks they are on.
void test_write_prefetch() {
  CHECK(write_prefetch_pays("AuthenticAMD"));
  for (const char* vendor : {"GenuineIntel", "HygonGenuine", "AuthenticAMD2", ""}) {
    CHECK(!write_prefetch_pays(vendor));
  }
  for (int prefetching = 0; prefetching < 4; ++prefetching) {  // A bit for each rank.
    const int fd = Segment::create(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const bool prefetches = prefetching >> rank & 1;
        Communicator communicator(  // With pidfds, as for processes, so that tensors are staged.
            Segment::map(fd, 2), rank, {-1, -1}, Seconds(30), [] {}, [] {}, [] {}, [] { return 1; },
            prefetches);
        for (size_t count : {0, 1, 250, 256, 500, 512, 1000, 1024, 1025, 5000}) {
          for (const DType dtype : kDTypes) {
            Bytes data = values(dtype, count, 5, rank);
            all_reduce(communicator, data.data(), count, dtype, Reduction::kSum, {});
            CHECK(data == reduced(dtype, count, 5, 2, Reduction::kSum));
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
    close(fd);
  }
}

// one_shot is up to 2 KiB of few ranks, and up to 16 KiB of more.
void test_choice() {
  for (const int ranks : {2, 4, 5, 64}) {
    const size_t limit = ranks <= 4 ? 2048 : 16384;
    CHECK(choose_algorithm(1, ranks) == Algorithm::kOneShot);
    CHECK(choose_algorithm(limit, ranks) == Algorithm::kOneShot);
    CHECK(choose_algorithm(limit + 1, ranks) == Algorithm::kTwoShot);
  }
}

// A rank that has announced its call is met by a rank that comes later, and does not meet it.
void test_meeting(Communicator& communicator, const SharedCounter& announced) {
  const int me = communicator.rank();
  for (int call = 1; call <= 20; ++call) {
    if (me != call % 2) announced.wait_for(call);
    CHECK(communicator.meets_peers() == (me != call % 2));
    if (me == call % 2) announced.add();
    random_call(communicator, call);
  }
}

void test_close(Communicator& communicator, bool abort) {
  const int leaver = communicator.world_size() - 1;
  stress(communicator, 3, 5);
  if (communicator.rank() == leaver) return abort ? communicator.abort() : communicator.close();
  for (int i = 0; i < 2; ++i) {
    const auto error = expect<PeerError>([&] { barrier(communicator); });
    CHECK(error.rank == leaver);
  }
}

// A rank that gives up must not return, and free its data, while a peer still reads them. Returns
// whether the peer took so long to write `count` results that it saw the other rank give up. (A
// peer that finishes just before that sees no failure.)
bool give_up_while_read(size_t count) {
  const int fd = Segment::create(2);
  const auto segment = Segment::map(fd, 2);
  close(fd);
  const auto reduce = [&](Communicator& communicator, const float* input, float* output) {
    reduce_scatter(communicator, input, output, count, DType::kFloat32, Reduction::kSum);
  };
  bool gave_up = false, noticed = false;
  std::atomic<bool> ready{false};
  std::thread reader([&] {
    Communicator communicator(segment, 0, {}, Seconds(30), [] {});
    const std::vector<float> input(2 * count, 1.f);
    std::unique_ptr<float[]> output(new float[count]);  // Not touched yet: page faults take time.
    ready = true;
    try {
      reduce(communicator, input.data(), output.get());
    } catch (const PeerError& error) {
      noticed = true;
      CHECK(error.rank == 1 && error.reason == Reason::kAborted);
    }
  });
  {
    struct GaveUp {};
    Communicator communicator(segment, 1, {}, Seconds(30), [&] {
      if (ready) throw GaveUp();
    });
    std::vector<float> input(2 * count, 1.f), output(count);
    try {
      reduce(communicator, input.data(), output.data());
    } catch (const GaveUp&) {
      gave_up = true;
    }
    input = std::vector<float>();  // AddressSanitizer reports it if the reader still reads them.
  }
  reader.join();
  CHECK(gave_up || !noticed);
  return noticed;
}

// If a rank is killed at a random point in a sequence of collectives, every survivor names it.
void test_kill(int world_size, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int victim = random() % world_size;
  const auto delay = std::chrono::microseconds(random() % 20000);
  run_processes(
      world_size,
      [&](Communicator& communicator) {
        if (communicator.rank() == victim) {
          std::thread([delay] {
            std::this_thread::sleep_for(delay);
            kill(getpid(), SIGKILL);
          }).detach();
        }
        const auto error = expect<PeerError>([&] { stress(communicator, seed, 1 << 20); });
        CHECK(communicator.rank() != victim);
        CHECK(error.rank == victim);
      },
      Seconds(30), victim);
}

void test_forked_child() {
  const int fd = Segment::create(1);
  auto communicator = join(fd, 1, 0, {-1}, Seconds(30));
  close(fd);
  barrier(*communicator);
  Bytes data(1);
  const auto receive = [&] { communicator->messages().start(false, data.data(), 1, 0, 0); };
  receive();  // Starts a thread.
  const pid_t pid = fork();
  if (pid == 0) {
    expect<std::runtime_error>([&] { barrier(*communicator); });
    expect<std::runtime_error>(receive);
    communicator.reset();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  barrier(*communicator);  // The child has not closed the parent's communicator.
}

// Several threads of every rank use one communicator at once.
void test_concurrent(Communicator& communicator) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        std::vector<int32_t> ones(5000, 1);
        all_reduce(communicator, ones.data(), ones.size(), DType::kInt32, Reduction::kSum, {});
        for (const int32_t one : ones) CHECK(one == communicator.world_size());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

// all_reduce_test [CALLS [ONE_IN]]: makes CALLS random calls. With ONE_IN, delays ranks randomly at
// one in ONE_IN of the points where they synchronise, and omits the tests that measure time.
int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 30;
  fuzz_one_in = argc > 2 ? std::atoi(argv[2]) : 0;
  const bool delayed = fuzz_one_in > 0;
  for (int world_size = 1; world_size <= 4; ++world_size) {
    const auto body = [&](Communicator& c) { stress(c, world_size, calls); };
    run_processes(world_size, body);
    run_threads(world_size, body);
  }
  run_threads(8, [&](Communicator& c) { stress(c, 8, calls / 4); });
  threads_of_a_rank = 3;
  for (int world_size = 2; world_size <= 4; ++world_size) {
    const auto body = [&](Communicator& c) { stress(c, 20 + world_size, calls); };
    run_processes(world_size, body);
    run_threads(world_size, body);
  }
  for (int seed = 0; seed < calls / 6; ++seed) test_kill(2 + seed % 3, 100 + seed);
  threads_of_a_rank = 1;
  for (const auto run : {run_threads, +[](int n, const RankBody& body, Seconds timeout) {
                           run_processes(n, body, timeout);
                         }}) {
    run(3, test_mismatch, Seconds(30));
    if (!delayed) run(2, test_wake, Seconds(30));
    const SharedCounter failed;
    if (!delayed) run(3, [&](Communicator& c) { test_timeout(c, failed); }, Seconds(2));
    run(3, [](Communicator& c) { test_close(c, false); }, Seconds(30));
    run(3, [](Communicator& c) { test_close(c, true); }, Seconds(30));
    run(2, test_concurrent, Seconds(30));
    const SharedCounter announced;
    run(2, [&](Communicator& c) { test_meeting(c, announced); }, Seconds(30));
  }
  for (int seed = 0; seed < calls / 6; ++seed) test_kill(2 + seed % 3, seed);
  if (delayed) return 0;
  for (size_t count = 8 << 20; !give_up_while_read(count); count *= 2) CHECK(count < 1 << 28);
  const SharedCounter steps;
  run_processes(2, [&](Communicator& c) { test_late_writes(c, steps); }, Seconds(2));
  test_wrap();
  test_write_prefetch();
  test_choice();
  test_forked_child();
  return 0;
}
