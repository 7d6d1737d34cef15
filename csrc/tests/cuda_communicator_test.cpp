// The host code of CUDA communicators, on the fake CUDA runtime of CPU threads: set-up, launches,
// graphs, symmetric memory, mismatches, late and lost ranks, shutdown.

#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "../cuda/collectives/communicator.cu"
#include "../cuda/shared_memory/symmetric_heap.cu"
#include "device_team.h"
#include "pipekernels/collectives/all_gather.cuh"
#include "pipekernels/collectives/all_reduce.cuh"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/collectives/broadcast.cuh"
#include "pipekernels/collectives/reduce_scatter.cuh"
#include "ranks.h"

namespace pipekernels {
namespace {

using fake_cuda::Kernel;
using fake_cuda::Stream;
using Float = ElementOf<DType::kFloat32>;

constexpr int kThreadsOfBlock = 2;

Kernel kernel_of(void (*body)(CpuTeam&, const DeviceLaunch&)) {
  return {sizeof(DeviceLaunch), [body](const std::byte* argument) {
            DeviceLaunch launch;
            std::memcpy(static_cast<void*>(&launch), argument, sizeof(launch));
            run_stream({{launch, body}}, launch.blocks, kThreadsOfBlock);
          }};
}

Kernel one_shot = kernel_of(all_reduce_block<Algorithm::kOneShot, Float, CpuTeam>);
Kernel two_shot = kernel_of(all_reduce_block<Algorithm::kTwoShot, Float, CpuTeam>);
Kernel ring = kernel_of(all_reduce_block<Algorithm::kRing, Float, CpuTeam>);
Kernel scatter = kernel_of(reduce_scatter_block<Float, CpuTeam>);
Kernel gather = kernel_of(all_gather_block<CpuTeam>);
Kernel send = kernel_of(broadcast_block<CpuTeam>);

}  // namespace

void add_all_reduce_kernels(KernelList& kernels) {
  for (Kernel* kernel : {&one_shot, &two_shot, &ring}) kernels.push_back(kernel);
}
void add_reduce_scatter_kernels(KernelList& kernels) { kernels.push_back(&scatter); }
void add_all_gather_kernels(KernelList& kernels) { kernels.push_back(&gather); }
void add_broadcast_kernels(KernelList& kernels) { kernels.push_back(&send); }

namespace {

constexpr size_t kHeap = 1 << 20;
constexpr Algorithm kFixedAlgorithms[] = {Algorithm::kOneShot, Algorithm::kTwoShot,
                                          Algorithm::kRing};

// One rank with its own stream.
struct Rank {
  explicit Rank(Communicator& core, size_t heap = kHeap)
      : cuda(core, 0, heap), stream(fake_cuda::make_stream()) {}

  uint64_t location_of(const float* data, size_t count) const {
    return cuda.location_of(data, count * sizeof(float));
  }
  void all_reduce(float* data, size_t count, Algorithm way = Algorithm::kTwoShot) {
    all_reduce_in(stream, data, count, way);
  }
  void all_reduce_in(Stream* in, float* data, size_t count, Algorithm way) {
    const Call call{Operation::kAllReduce, DType::kFloat32, {}, way, 0, 0, count};
    const Kernel& kernel = way == Algorithm::kOneShot   ? one_shot
                           : way == Algorithm::kTwoShot ? two_shot
                                                        : ring;
    cuda.launch(&kernel, plan_all_reduce(cuda.ranks(), call, way, data, location_of(data, count)),
                {in, true});
  }
  void reduce_scatter(const float* input, float* output, size_t count) {
    const Call call{Operation::kReduceScatter, DType::kFloat32, {}, {}, 0, 0, count};
    cuda.launch(&scatter,
                plan_reduce_scatter(cuda.ranks(), call, input, output, location_of(input, count)),
                {stream, true});
  }
  void all_gather(const float* input, float* output, size_t count) {
    const Call call{Operation::kAllGather, DType::kFloat32, {}, {}, 0, 0, count};
    cuda.launch(&gather,
                plan_all_gather(cuda.ranks(), call, input, output, location_of(input, count)),
                {stream, true});
  }
  void broadcast(float* data, size_t count, int root) {
    const auto from = static_cast<uint32_t>(root);
    const auto way = cuda.world_size() > 1 ? Algorithm::kTwoShot : Algorithm::kOneShot;
    const Call call{Operation::kBroadcast, DType::kFloat32, {}, way, from, 0, count};
    cuda.launch(&send, plan_broadcast(cuda.ranks(), call, data, location_of(data, count)),
                {stream, true});
  }
  std::unique_ptr<CudaBuffer> allocate(size_t count, Stream* in) {
    return cuda.allocate(count * sizeof(float), in);
  }

  int number() const { return cuda.rank(); }
  // The sum over ranks if rank r contributes r + 1.
  float sum() const { return static_cast<float>(cuda.world_size() * (cuda.world_size() + 1)) / 2; }

  CudaCommunicator cuda;
  Stream* const stream;
};

float* floats(const CudaBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

bool all_are(const float* data, size_t count, float value) {
  return std::all_of(data, data + count, [value](float v) { return v == value; });
}

// The message of the Error that body() must throw.
template <class Error, class Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  CHECK(!"nothing has been thrown");
  return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// A flag in memory that forked processes share.
class SharedFlag {
 public:
  SharedFlag()
      : flag_(static_cast<std::atomic<int>*>(
            mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  void set() const { flag_->store(1); }
  void wait() const {
    const auto end = Clock::now() + std::chrono::seconds(60);
    while (flag_->load() == 0) {
      CHECK(Clock::now() < end);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

 private:
  std::atomic<int>* const flag_;
};

// ---- successful calls
void use_everything(Communicator& core) {
  Rank rank(core);
  const int n = rank.cuda.world_size(), me = rank.number();
  std::vector<float> ordinary(80'000), result(80'000);
  const auto symmetric = rank.allocate(80'000, rank.stream);
  CHECK(rank.allocate(kHeap, rank.stream) == nullptr);
  Stream* const other = fake_cuda::make_stream();
  for (float* data : {ordinary.data(), floats(*symmetric)}) {
    for (const Algorithm way : kFixedAlgorithms) {
      for (const size_t count : {0, 1, 1000, 70'001}) {
        std::fill_n(data, count + 1, me + 1.0f);
        rank.all_reduce(data, count, way);
        rank.all_reduce_in(other, data, count, way);  // Ordered after the first.
        rank.cuda.synchronize();
        CHECK(all_are(data, count, n * rank.sum()) && data[count] == me + 1.0f);
      }
    }
    std::fill_n(data, 6000, me + 1.0f);
    rank.all_gather(data, result.data(), 5000);
    rank.cuda.synchronize();
    for (int r = 0; r < n; ++r) CHECK(all_are(result.data() + r * 5000, 5000, r + 1.0f));
    rank.reduce_scatter(data, result.data(), 6000);
    rank.cuda.synchronize();
    CHECK(all_are(result.data(), 6000 / n, rank.sum()));
    rank.broadcast(data, 6000, n - 1);
    rank.cuda.synchronize();
    CHECK(all_are(data, 6000, static_cast<float>(n)));
  }
  rank.cuda.close(false);
  rank.cuda.close(false);
  CHECK(all_are(floats(*symmetric), 6000, static_cast<float>(n)));  // The buffer outlives close().
  CHECK(has(thrown<std::runtime_error>([&] { rank.cuda.check(); }), "has been closed"));
}

// Communicators may have fewer blocks, and then run at the same time.
void use_few_blocks(Communicator& core) {
  Rank rank(core);
  CudaCommunicator few(core, 0, kHeap, 1);
  CHECK(few.ranks().layout.blocks == 1 && rank.cuda.ranks().layout.blocks > 1);
  std::vector<float> data(70'000, rank.number() + 1.0f), other(data);
  const Call call{Operation::kAllReduce, DType::kFloat32, {}, Algorithm::kTwoShot, 0, 0, 70'000};
  const DeviceLaunch launch = plan_all_reduce(few.ranks(), call, call.algorithm, other.data(), 0);
  CHECK(launch.blocks == 1);
  rank.all_reduce(data.data(), data.size());
  few.launch(&two_shot, launch, {fake_cuda::make_stream(), true});
  rank.cuda.synchronize();
  few.synchronize();
  CHECK(all_are(data.data(), data.size(), rank.sum()));
  CHECK(all_are(other.data(), other.size(), rank.sum()));
}

void replay(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(50'000);
  rank.all_reduce(data.data(), data.size());
  rank.stream->begin_capture();
  rank.all_reduce(data.data(), data.size());
  rank.all_reduce(data.data(), data.size(), Algorithm::kRing);
  std::vector<float> few(3'000);
  rank.all_reduce(few.data(), few.size(), Algorithm::kOneShot);  // Pushed.
  const std::vector<fake_cuda::Task> graph = rank.stream->end_capture();
  const int n = rank.cuda.world_size();
  for (int i = 1; i <= 3; ++i) {
    rank.stream->push([&] {
      std::fill(data.begin(), data.end(), rank.number() + 1.0f);
      std::fill(few.begin(), few.end(), rank.number() + 1.0f);
    });
    for (const auto& task : graph) rank.stream->push(task);
    rank.stream->drain();
    rank.cuda.check();
    CHECK(all_are(data.data(), data.size(), n * rank.sum()));
    CHECK(all_are(few.data(), few.size(), rank.sum()));
    rank.all_reduce(few.data(), few.size(), Algorithm::kOneShot);
    rank.cuda.synchronize();
    CHECK(all_are(few.data(), few.size(), n * rank.sum()));
    std::fill(data.begin(), data.end(), rank.number() + 1.0f);
    rank.all_reduce(data.data(), data.size());
    rank.cuda.synchronize();
    CHECK(all_are(data.data(), data.size(), rank.sum()));
  }
  // close() waits for running graphs.
  if (rank.number() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::atomic<bool> done{false};
  for (const auto& task : graph) rank.stream->push(task);
  rank.stream->push([&] { done = true; });
  rank.cuda.close(false);
  CHECK(done);
}

// A graph is replayed in a stream that does not wait for a collective that still runs.
void replay_too_early(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(5'000), other(5'000);
  rank.stream->begin_capture();
  rank.all_reduce(other.data(), other.size());
  const std::vector<fake_cuda::Task> graph = rank.stream->end_capture();
  Stream* const second = fake_cuda::make_stream();
  if (rank.number() == 0) {
    rank.all_reduce(data.data(), data.size());  // Waits for rank 1, which comes later.
    const DeviceRanks& seen = rank.cuda.ranks();
    const uint64_t* busy = &seen.layout.state(seen.memory[0], 0).busy;
    while (__atomic_load_n(busy, __ATOMIC_ACQUIRE) == 0) rest(10);
    for (const auto& task : graph) second->push(task);
    second->drain();
    rank.stream->drain();
    const auto text = thrown<std::runtime_error>([&] { rank.cuda.check(); });
    CHECK(has(text, "began while another collective of this rank still ran"));
    CHECK(has(text, "all_reduce(5000 x float32"));
    CHECK(
        has(thrown<std::runtime_error>([&] { rank.all_reduce(data.data(), 8); }), "after a fail"));
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    thrown<PeerError>([&] {
      rank.all_reduce(data.data(), data.size());
      rank.cuda.synchronize();
    });
  }
}

// A rank may load a kernel between two collectives, which waits until the device is idle.
void load_kernels_late(Communicator& core) {
  static Kernel kernels[12];
  Rank rank(core);
  const int n = rank.cuda.world_size(), me = rank.number();
  std::vector<float> data(1000);
  for (int i = 0; i < 12 / n; ++i) {
    Kernel& own = kernels[i * n + me];
    own.argument_bytes = 1;
    own.body = [&](const std::byte*) { std::fill(data.begin(), data.end(), me + 1.0f); };
    if ((i + me) % n == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    char nothing = 0;
    void* arguments[] = {&nothing};
    CHECK(cudaLaunchKernel(&own, 1, 1, arguments, 0, rank.stream) == cudaSuccess);
    rank.all_reduce(data.data(), data.size());
  }
  rank.cuda.synchronize();
  CHECK(all_are(data.data(), data.size(), rank.sum()));
}

// Meanwhile a thread that is not a rank may free memory, which waits until the device is idle.
void free_memory_meanwhile(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(1000);
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (rank.number() == 0 && !done) DeviceMemory(0, 4096, nullptr, 0);
  });
  for (int i = 0; i < 100; ++i) {
    std::fill(data.begin(), data.end(), rank.number() + 1.0f);
    rank.all_reduce(data.data(), data.size());
    rank.cuda.synchronize();
    CHECK(all_are(data.data(), data.size(), rank.sum()));
  }
  done = true;
  other.join();
}

// A block released in one stream can be used in another, ordered after the first use.
void reuse_memory(Communicator& core) {
  Rank rank(core);
  Stream* const other = fake_cuda::make_stream();
  float* first = nullptr;
  {
    const auto buffer = rank.allocate(kHeap / sizeof(float), rank.stream);
    first = floats(*buffer);
    rank.stream->push([first] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      first[7] = 1;
    });
  }
  const auto buffer = rank.allocate(kHeap / sizeof(float), other);
  CHECK(buffer != nullptr && floats(*buffer) == first);
  other->push([first] { first[7] = 2; });
  other->drain();
  rank.stream->drain();
  CHECK(first[7] == 2);
}

// A block may have been used by a collective in another stream than its own.
void reuse_memory_of_other_streams(Communicator& core) {
  Rank rank(core);
  Stream* const other = fake_cuda::make_stream();
  constexpr size_t count = kHeap / sizeof(float);
  float* first = nullptr;
  {
    const auto buffer = rank.allocate(count, rank.stream);
    first = floats(*buffer);
    if (rank.number() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    rank.all_reduce_in(other, first + 100, 50, Algorithm::kTwoShot);
    other->push([first] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      first[7] = 1;
    });
  }
  {
    const auto buffer = rank.allocate(count, rank.stream);
    CHECK(buffer != nullptr && floats(*buffer) == first);
    rank.stream->push([first] { first[7] = 2; });
    rank.stream->drain();
    other->drain();
    CHECK(first[7] == 2);
  }
  // While a graph is captured, its stream cannot be waited for.
  rank.allocate(1, other).reset();
  other->begin_capture();
  const std::string told = thrown<std::runtime_error>([&] { rank.allocate(1, rank.stream); });
  CHECK(has(told, "allocate symmetric tensors before the capture"));
  other->end_capture();
  CHECK(rank.allocate(count, rank.stream) != nullptr);
}

// A graph may use what it has captured at any time.
void keep_captured_memory(Communicator& core) {
  Rank rank(core);
  constexpr size_t count = kHeap / sizeof(float) / 2;
  float* first = nullptr;
  std::vector<fake_cuda::Task> graph;
  {
    const auto buffer = rank.allocate(count, rank.stream);
    first = floats(*buffer);
    rank.stream->begin_capture();
    rank.all_reduce(first, 50);
    graph = rank.stream->end_capture();
  }
  for (int i = 0; i < 3; ++i) {
    const auto buffer = rank.allocate(count, rank.stream);
    CHECK(buffer != nullptr && floats(*buffer) != first);
    rank.stream->begin_capture();  // Released while a graph is captured in its stream.
    if (i == 2) continue;
    rank.stream->end_capture();
  }
  rank.stream->end_capture();
  CHECK(rank.allocate(count, rank.stream) == nullptr);
  std::fill(first, first + 50, 1.0f);
  for (const auto& task : graph) rank.stream->push(task);
  rank.stream->drain();
  CHECK(all_are(first, 50, static_cast<float>(rank.cuda.world_size())));
}

// ---- set-up
void fail_set_up(Communicator& core) {
  auto& device = fake_cuda::device();
  const size_t room = device.room;
  if (core.rank() == 1) device.room = 0;
  const std::string problem = thrown<std::runtime_error>([&] { Rank rank(core); });
  CHECK(has(problem, "the ranks cannot use CUDA: rank 1: no room for"));
  if (core.rank() == 1) device.room = room;
  const std::string told = thrown<std::runtime_error>(
      [&] { const CudaCommunicator other(core, 0, kHeap, 8 - core.rank()); });
  CHECK(has(told, "device_blocks must be the same on all ranks, got 8 on rank 0 and 7 on rank 1"));
  CHECK(device.memory.empty() && device.mapped.empty() && device.pinned.empty() &&
        device.events.empty());
  use_everything(core);
  core.close();
  CHECK(has(thrown<std::runtime_error>([&] { Rank rank(core); }), "has been closed"));
}

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

void be_late(Communicator& core, const SharedFlag& given_up) {
  Rank rank(core);
  std::vector<float> data(20'000, 1.0f);
  rank.all_reduce(data.data(), data.size());
  rank.cuda.synchronize();
  if (rank.number() == 1) given_up.wait();
  const std::string told = thrown<TimeoutError>([&] {
    rank.all_reduce(data.data(), data.size());
    rank.cuda.synchronize();
  });
  given_up.set();
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
      thrown<PeerError>([&] { rank.cuda.launch(&two_shot, launch, {rank.stream, true}); });
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
void keep_mapped_memory(Communicator& core, const SharedFlag& closed) {
  Rank rank(core);
  auto& memory = fake_cuda::device().memory;
  if (rank.number() == 1) closed.wait();
  rank.cuda.close(false);
  CHECK(memory.size() == (rank.number() == 0 ? 1 : 0));
  closed.set();
  barrier(core);
  const DeviceMemory next(0, 4096, nullptr, rank.number());
  CHECK(memory.size() == 1 && memory.count(next.base()) == 1);
}

// Forks while another thread, which the child does not have, is in a call.
void fork_a_child(Communicator& core, const SharedFlag& forked) {
  auto rank = std::make_unique<Rank>(core);
  std::vector<float> data(1000, rank->number() + 1.0f);
  if (rank->number() == 1) {
    forked.wait();
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
  forked.set();
  waiting.join();
  CHECK(all_are(data.data(), data.size(), rank->sum()));
}

size_t entries(const char* folder) {
  const std::filesystem::directory_iterator begin(folder);
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

void test_processes() {
  for (const int n : {1, 2, 3}) run_processes(n, use_everything);
  run_processes(2, replay);
  run_processes(2, replay_too_early);
  run_processes(2, fail_set_up);
  run_processes(2, use_few_blocks);
  run_processes(2, call_differently);
  const SharedFlag given_up;
  run_processes(2, [&](Communicator& core) { be_late(core, given_up); }, Seconds(3));
  for (const Leave how : {Leave::kDie, Leave::kClose, Leave::kAbort}) {
    const Algorithm way = how == Leave::kDie ? Algorithm::kOneShot : Algorithm::kTwoShot;
    const auto body = [=](Communicator& core) { lose_rank_1(core, how, way); };
    run_processes(3, body, Seconds(30), how == Leave::kDie ? 1 : -1);
  }
  const SharedFlag closed;
  run_processes(2, [&](Communicator& core) { keep_mapped_memory(core, closed); });
  const SharedFlag forked;
  run_processes(2, [&](Communicator& core) { fork_a_child(core, forked); });
}

void test_threads() {
  for (const int n : {1, 2, 3}) run_threads(n, use_everything);
  fake_cuda::device().one_queue = true;
  run_threads(3, use_everything);
  fake_cuda::device_pointer().reset();
  run_threads(3, load_kernels_late);
  run_threads(3, free_memory_meanwhile);
  run_threads(1, reuse_memory);
  run_threads(2, reuse_memory_of_other_streams);
  run_threads(2, keep_captured_memory);
  run_threads(2, call_differently);
  run_threads(2, mix_devices);
  run_threads(2, share_a_stream);
  run_threads(2, fail_to_launch);
  for (const Leave how : {Leave::kClose, Leave::kAbort}) {
    run_threads(2, [how](Communicator& core) { lose_rank_1(core, how, Algorithm::kOneShot); });
  }
  // No memory, file descriptor or watcher thread is left.
  const auto& device = fake_cuda::device();
  CHECK(device.memory.empty() && device.pinned.empty() && device.events.empty());
  fake_cuda::device_pointer().reset();
  const size_t files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  run_threads(2, use_everything);
  fake_cuda::device_pointer().reset();
  CHECK(entries("/proc/self/fd") == files && entries("/proc/self/task") == threads);
}

}  // namespace
}  // namespace pipekernels

int main() {
  pipekernels::test_processes();  // First, since a process with threads must not fork.
  pipekernels::test_threads();
}
