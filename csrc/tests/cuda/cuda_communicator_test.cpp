// The host code of CUDA communicators, on the fake CUDA runtime of CPU threads: set-up, launches,
// graphs, growth of symmetric memory. Its reuse is in cuda_heap_test.cpp, failures and shutdown are
// in cuda_failures_test.cpp.

#include <atomic>
#include <filesystem>

#include "cuda_rank.h"

namespace pipekernels {
namespace {

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

// A stream may get the handle of one that was destroyed while a collective ran in it.
void use_a_new_stream(Communicator& core) {
  Rank rank(core);
  std::vector<float> data(1000, rank.number() + 1.0f);
  if (rank.number() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  rank.all_reduce(data.data(), data.size());
  rank.stream->make_anew();
  rank.all_reduce(data.data(), data.size());
  rank.cuda.synchronize();
  CHECK(all_are(data.data(), data.size(), 2 * rank.sum()));
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
  few.launch(&two_shot_kernel, launch, {fake_cuda::make_stream(), true});
  rank.cuda.synchronize();
  few.synchronize();
  CHECK(all_are(data.data(), data.size(), rank.sum()));
  CHECK(all_are(other.data(), other.size(), rank.sum()));
}

// A child, whose ranks are in reverse order, shares its parent's symmetric memory, also after the
// parent has been closed; beside it takes memory for its staging alone.
void share_heap(Communicator& core, Communicator& reversed) {
  auto parent = std::make_unique<Rank>(core);
  Rank child(reversed, kHeap, &parent->cuda), grandchild(reversed, kHeap, &child.cuda);
  CHECK(child.number() == child.cuda.world_size() - 1 - parent->number());
  const auto from_parent = parent->allocate(50'000, parent->stream);
  const auto from_child = child.allocate(50'000, child.stream);
  CHECK(parent->allocate(kHeap / sizeof(float) - 99'000, parent->stream) == nullptr);
  const std::vector<float*> tensors{floats(*from_parent), floats(*from_child)};
  for (Rank* rank : {parent.get(), &child, &grandchild}) {
    if (rank == &grandchild) parent.reset();
    for (float* data : tensors) {
      CHECK(rank->location_of(data, 50'000) != 0);
      for (const Algorithm way : kFixedAlgorithms) {
        std::fill_n(data, 50'000, rank->number() + 1.0f);
        rank->all_reduce(data, 50'000, way);
        rank->cuda.synchronize();
        CHECK(all_are(data, 50'000, rank->sum()));
      }
    }
  }
  barrier(core);  // No rank has unmapped its peers' memory before.
}

constexpr size_t kLimit = 64 << 20;  // Of a heap that begins with a sixteenth.

size_t bytes_taken() {
  size_t bytes = 0;
  for (const auto& [base, allocation] : fake_cuda::device().memory) bytes += allocation.bytes;
  return bytes;
}

// A child takes device memory for its staging alone.
void take_little_memory(Communicator& core, Communicator& reversed) {
  Rank parent(core);
  const size_t staging = parent.cuda.ranks().layout.heap();
  CHECK(bytes_taken() <= kHeap + staging + 512);
  const Rank child(reversed, kHeap, &parent.cuda);
  CHECK(bytes_taken() <= kHeap + 2 * (staging + 512));
  const Rank orphan(reversed, kHeap);
  CHECK(bytes_taken() > 2 * kHeap + 3 * staging);
}

// Symmetric memory grows on each rank alone, up to the limit. Peers access it in place once all
// have learnt of it, also through a child whose ranks are in another order.
void grow(Communicator& core, Communicator& reversed) {
  auto parent = std::make_unique<Rank>(core, kLimit);
  Rank child(reversed, kLimit, &parent->cuda);
  constexpr size_t count = 50'000, mib = (1 << 20) / sizeof(float);
  std::vector<float> ordinary(count);
  std::vector<std::unique_ptr<CudaBuffer>> buffers;
  // In the first part, in parts as large as all before them, in a larger one; on rank 0 alone.
  for (const size_t size : {3, 3, 5, 30, 15}) {
    if (parent->number() > 0) break;
    buffers.push_back(parent->allocate(size * mib, parent->stream));
    CHECK(buffers.back() != nullptr);
  }
  if (parent->number() == 0) CHECK(parent->allocate(20 * mib, parent->stream) == nullptr);
  if (!core.is_threads()) {
    const size_t staging = parent->cuda.ranks().layout.heap() + 512;
    CHECK(bytes_taken() <= (parent->number() == 0 ? kLimit : kLimit / 16) + 2 * staging);
  }
  for (Rank* rank : {parent.get(), &child}) {
    for (size_t i = 0; i < 5; ++i) {
      float* data = buffers.empty() ? ordinary.data() : floats(*buffers[i]);
      for (const Algorithm way : kFixedAlgorithms) {
        std::fill_n(data, count, rank->number() + 1.0f);
        rank->all_reduce(data, count, way);
        rank->cuda.synchronize();
        CHECK(all_are(data, count, rank->sum()));
        barrier(core);  // The peers have learnt of all growths, or will in the same call.
        if (!buffers.empty()) CHECK(rank->location_of(data, count) != 0);
      }
    }
    if (rank != &child) parent.reset();
  }
  barrier(core);  // No rank has unmapped its peers' memory before.
}

// A peer that is calls ahead has launched some that cannot access what has been added meanwhile.
void grow_behind_a_peer(Communicator& core, const SharedCounter& steps) {
  Rank rank(core, kLimit);
  std::vector<float> data[3];
  if (rank.number() == 1) {
    for (auto& each : data) each.assign(5'000, 2);
    for (int i = 0; i < 3; ++i) {
      if (i == 2) steps.wait_for(2);
      rank.all_reduce(data[i].data(), 5'000);
      if (i > 0) steps.add();
    }
    rank.cuda.synchronize();
    for (const auto& each : data) CHECK(all_are(each.data(), 5'000, 3));
    return;
  }
  steps.wait_for(1);
  const auto buffer = rank.allocate(kLimit / 8 / sizeof(float), rank.stream);
  steps.add();
  steps.wait_for(3);
  for (int i = 0; i < 3; ++i) {
    float* tensor = floats(*buffer) + i * 5'000;
    std::fill_n(tensor, 5'000, 1.0f);
    CHECK((rank.location_of(tensor, 5'000) != 0) == (i == 2));
    rank.all_reduce(tensor, 5'000);
  }
  rank.cuda.synchronize();
  CHECK(all_are(floats(*buffer), 15'000, 3));
}

// Once a graph holds launches, which know of no later growth, data in one are copied. So they are
// if a peer cannot map it. Without device memory, none is added.
void grow_in_vain(Communicator& core, bool captures) {
  Rank rank(core, kLimit);
  std::vector<float> ordinary(100);
  if (captures) {
    rank.stream->begin_capture();
    rank.all_reduce(ordinary.data(), 100);
    rank.stream->end_capture();
  }
  fake_cuda::device().refuses_ipc = !captures;
  const auto buffer = rank.allocate(kLimit / 8 / sizeof(float), rank.stream);
  for (int i = 0; i < 3; ++i) {
    std::fill_n(floats(*buffer), 5'000, rank.number() + 1.0f);
    rank.all_reduce(floats(*buffer), 5'000);
    rank.cuda.synchronize();
    CHECK(all_are(floats(*buffer), 5'000, rank.sum()));
    CHECK(rank.location_of(floats(*buffer), 5'000) == 0);
  }
  fake_cuda::device().room = 0;
  CHECK(rank.allocate(kLimit / 4 / sizeof(float), rank.stream) == nullptr);
}

using WithOther = void (*)(Communicator& core, Communicator& reversed);

void run_processes_twice(int n, WithOther body) {
  const int fd = Segment::create(n);
  run_processes(n, [&](Communicator& core) {
    body(core, *join(fd, n, n - 1 - core.rank(), std::vector<int>(n, -1), Seconds(30)));
  });
  close(fd);
}

void run_threads_twice(int n, WithOther body) {
  const int fd = Segment::create(n);
  const auto segment = Segment::map(fd, n);
  close(fd);
  run_threads(n, [&](Communicator& core) {
    Communicator reversed(segment, n - 1 - core.rank(), {}, Seconds(30), [] {});
    body(core, reversed);
  });
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
void replay_too_early(Communicator& core, const SharedCounter& replayed) {
  std::vector<float> data(5'000), other(5'000);  // Outlive the kernels that `rank` waits for.
  Rank rank(core);
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
    replayed.add();
  } else {
    replayed.wait_for(1);
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

size_t entries(const char* folder) {
  const std::filesystem::directory_iterator begin(folder);
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

void test_processes() {
  for (const int n : {1, 2, 3}) run_processes(n, use_everything);
  run_processes(2, replay);
  const SharedCounter replayed;
  run_processes(2, [&](Communicator& core) { replay_too_early(core, replayed); });
  run_processes(2, fail_set_up);
  run_processes(2, use_few_blocks);
  run_processes(2, use_a_new_stream);
  for (const int n : {1, 2, 3}) run_processes_twice(n, share_heap);
  run_processes_twice(2, take_little_memory);
  for (const int n : {1, 2, 3}) run_processes_twice(n, grow);
  const SharedCounter steps;
  run_processes(2, [&](Communicator& core) { grow_behind_a_peer(core, steps); });
  for (const bool captures : {false, true}) {
    run_processes(2, [&](Communicator& core) { grow_in_vain(core, captures); });
  }
}

void test_threads() {
  for (const int n : {1, 2, 3}) run_threads(n, use_everything);
  fake_cuda::device().one_queue = true;
  run_threads(3, use_everything);
  fake_cuda::device_pointer().reset();
  run_threads(3, load_kernels_late);
  run_threads(3, free_memory_meanwhile);
  run_threads_twice(3, share_heap);
  for (const int n : {1, 3}) run_threads_twice(n, grow);
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
