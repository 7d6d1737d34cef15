// Which blocks of symmetric memory are given out again, and when, on the fake CUDA runtime.

#include <atomic>

#include "cuda_rank.h"

namespace pipekernels {
namespace {

// A block released in one stream can be used in another, ordered after the first use; also in one
// that has got the handle of the first, which was destroyed.
void reuse_memory(Communicator& core, bool same_handle) {
  Rank rank(core);
  std::atomic<bool> ended{false};
  float* first = nullptr;
  {
    const auto buffer = rank.allocate(kHeap / sizeof(float), rank.stream);
    first = floats(*buffer);
    rank.stream->push([&ended] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ended = true;
    });
  }
  if (same_handle) rank.stream->make_anew();
  Stream* const other = same_handle ? rank.stream : fake_cuda::make_stream();
  const auto buffer = rank.allocate(kHeap / sizeof(float), other);
  CHECK(buffer != nullptr && floats(*buffer) == first);
  other->push([&ended] { CHECK(ended); });
  other->drain();
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
}

// What a capture allocates is read by peers in place, and given out again in that capture alone.
void allocate_in_captures(Communicator& core) {
  Rank rank(core);
  constexpr size_t count = kHeap / sizeof(float) / 8;
  Stream* const other = fake_cuda::make_stream();
  std::atomic<bool> ended{false};
  float* released = nullptr;
  {
    const auto buffer = rank.allocate(count, other);
    released = floats(*buffer);
    other->push([&ended] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ended = true;
    });
  }
  rank.stream->begin_capture();
  auto buffer = rank.allocate(count, rank.stream);
  float* const first = floats(*buffer);
  CHECK(ended && first == released && rank.location_of(first, count) != 0);
  rank.all_reduce(first, 50);
  buffer.reset();
  buffer = rank.allocate(count, rank.stream);
  CHECK(floats(*buffer) == first);
  const auto kept = rank.allocate(count, rank.stream);
  CHECK(floats(*kept) != first);
  buffer.reset();
  CHECK(floats(*rank.allocate(count, other)) != first);
  const auto graph = rank.stream->end_capture();

  CHECK(floats(*rank.allocate(count, rank.stream)) != first);
  rank.stream->begin_capture();
  const auto third = rank.allocate(count, rank.stream), fourth = rank.allocate(count, rank.stream);
  CHECK(floats(*third) != first && floats(*fourth) != first);
  CHECK(rank.allocate(1, rank.stream) == nullptr);  // Captures have half of the heap.
  rank.stream->end_capture();
  CHECK(rank.allocate(4 * count, rank.stream) != nullptr);

  std::fill(first, first + 50, 1.0f);
  for (const auto& task : graph) rank.stream->push(task);
  rank.stream->drain();
  CHECK(all_are(first, 50, static_cast<float>(rank.cuda.world_size())));
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

}  // namespace
}  // namespace pipekernels

int main() {
  using namespace pipekernels;
  for (const bool same_handle : {false, true}) {
    run_threads(1, [&](Communicator& core) { reuse_memory(core, same_handle); });
  }
  run_threads(2, reuse_memory_of_other_streams);
  run_threads(2, allocate_in_captures);
  run_threads(2, keep_captured_memory);
}
