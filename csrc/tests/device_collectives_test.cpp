// The CUDA collectives on devices made of CPU threads: bits, grids, orders of calls, replays, late
// and stopped ranks, mismatches, and calls that overlap.

#include <chrono>
#include <random>

#include "device_team.h"
#include "pipekernels/collectives/all_gather_block.cuh"
#include "pipekernels/collectives/all_reduce/one_shot.cuh"
#include "pipekernels/collectives/all_reduce/ring.cuh"
#include "pipekernels/collectives/all_reduce/two_shot.cuh"
#include "pipekernels/collectives/all_reduce_launch.cuh"
#include "pipekernels/collectives/broadcast_block.cuh"
#include "pipekernels/collectives/reduce_scatter_block.cuh"
#include "pipekernels/elements/tree_order.h"
#include "values.h"

namespace {

using namespace pipekernels;

void all_reduce_kernel(CpuTeam& team, const DeviceLaunch& launch, Algorithm algorithm) {
  const Call& call = launch.descriptor.call;
  const Order of_kernel = kernel_order(call, algorithm, launch.ranks.layout.ranks);
  with_element_and_order(call.dtype, of_kernel, [&](auto element, auto order) {
    using Type = decltype(element);
    if (algorithm == Algorithm::kOneShot) {
      one_shot_block<order, Type>(team, launch);
    } else if (algorithm == Algorithm::kTwoShot) {
      two_shot_block<order, Type>(team, launch);
    } else {
      ring_block<Type>(team, launch);
    }
  });
}

void reduce_scatter_kernel(CpuTeam& team, const DeviceLaunch& launch) {
  const Call& call = launch.descriptor.call;
  const Order of_kernel = order_of(call.reduction, launch.ranks.layout.ranks);
  with_element_and_order(call.dtype, of_kernel, [&](auto element, auto order) {
    reduce_scatter_block<order, decltype(element)>(team, launch);
  });
}

// Memory of one rank in one call, symmetric or not, `shift` bytes after an aligned address.
class Buffer {
 public:
  Buffer(CpuDevices& devices, int rank, bool symmetric, size_t shift, const Bytes& contents)
      : bytes_(contents.size()) {
    if (symmetric) {
      location_ = devices.allocate(rank, bytes_ + shift) + shift;
      data_ = devices.at(rank, location_);
    } else {
      ordinary_.reset(new std::byte[bytes_ + shift]);
      data_ = ordinary_.get() + shift;
    }
    fill(contents);
  }
  std::byte* data() const { return data_; }
  uint64_t location() const { return location_; }
  size_t bytes() const { return bytes_; }
  void fill(const Bytes& contents) {
    if (!contents.empty()) std::memcpy(data_, contents.data(), contents.size());
  }
  bool poisoned() const {
    return std::all_of(data_, data_ + bytes_, [](std::byte b) { return b == std::byte{0xff}; });
  }

 private:
  const size_t bytes_;
  std::byte* data_;
  uint64_t location_ = 0;
  std::unique_ptr<std::byte[]> ordinary_;
};

// One collective of all ranks.
struct Case {
  Call call{};
  Algorithm algorithm = Algorithm::kOneShot;             // The algorithm to run.
  std::vector<Bytes> contents;                           // The contents of the inputs.
  std::vector<std::unique_ptr<Buffer>> inputs, outputs;  // In-place calls have empty outputs.

  CpuLaunch launch(CpuDevices& devices, int rank) const {
    const DeviceRanks ranks = devices.seen_by(rank);
    Buffer& input = *inputs[rank];
    switch (call.operation) {
      case Operation::kAllReduce:
        return {
            plan_all_reduce(ranks, call, algorithm, input.data(), input.location()),
            [way = algorithm](CpuTeam& t, const DeviceLaunch& l) { all_reduce_kernel(t, l, way); }};
      case Operation::kReduceScatter:
        return {
            plan_reduce_scatter(ranks, call, input.data(), outputs[rank]->data(), input.location()),
            reduce_scatter_kernel};
      case Operation::kAllGather:
        return {plan_all_gather(ranks, call, input.data(), outputs[rank]->data(), input.location()),
                all_gather_block<CpuTeam>};
      default:
        return {plan_broadcast(ranks, call, input.data(), input.location()),
                broadcast_block<CpuTeam>};
    }
  }

  // Checks inputs and outputs after the call, and updates `contents`.
  void check() {
    const int ranks = static_cast<int>(inputs.size());
    if (call.operation == Operation::kAllReduce) {
      contents.assign(ranks, reduced(contents, call.dtype, call.reduction));
    }
    if (call.operation == Operation::kBroadcast) {
      contents.assign(ranks, Bytes(contents[call.root]));
    }
    Bytes whole;
    if (call.operation == Operation::kReduceScatter) {
      whole = reduced(contents, call.dtype, call.reduction);
    }
    if (call.operation == Operation::kAllGather) {
      for (const Bytes& part : contents) whole.insert(whole.end(), part.begin(), part.end());
    }
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK(equal(inputs[rank]->data(), contents[rank]));
      if (call.operation == Operation::kAllGather) CHECK(equal(outputs[rank]->data(), whole));
      if (call.operation == Operation::kReduceScatter) {
        const size_t part = whole.size() / ranks;
        const Bytes own(whole.begin() + rank * part, whole.begin() + (rank + 1) * part);
        CHECK(equal(outputs[rank]->data(), own));
      }
    }
  }
};

Case random_case(std::mt19937_64& random, CpuDevices& devices, size_t most_bytes) {
  const int ranks = devices.layout().ranks;
  Case made;
  Call& call = made.call;
  call.operation = static_cast<Operation>(1 + random() % 8 % 4);
  call.dtype = static_cast<DType>(random() % kReducibleDTypes);
  call.shape = 77;
  const size_t size = size_of(call.dtype);
  size_t count = random() % 5 == 0 ? random() % 9 : random() % (most_bytes / size);
  if (random() % 10 == 0) count = 0;
  if (call.operation == Operation::kReduceScatter) count = count / ranks * ranks;
  call.count = count;
  if (call.operation == Operation::kAllReduce || call.operation == Operation::kReduceScatter) {
    call.reduction = static_cast<Reduction>(random() % kDeviceReductions);
    if (is_integer(call.dtype) && is_average(call.reduction)) call.reduction = Reduction::kSum;
  }
  if (call.operation == Operation::kBroadcast) {
    call.root = random() % ranks;
    call.algorithm = ranks > 1 && random() % 2 ? Algorithm::kTwoShot : Algorithm::kOneShot;
  }
  if (call.operation == Operation::kAllReduce) {
    // A ring needs two ranks; all_reduce_cuda() launches nothing for one.
    call.algorithm = static_cast<Algorithm>(1 + random() % (ranks == 1 ? 2 : 3));
    made.algorithm = call.algorithm;
  }
  const int symmetric_ranks = random() % 3;  // 0: none, 1: some, 2: all.
  const uint64_t seed = random();
  for (int rank = 0; rank < ranks; ++rank) {
    const bool symmetric = symmetric_ranks == 2 || (symmetric_ranks == 1 && random() % 2);
    const size_t shift = random() % 3 ? 0 : random() % 16 / size * size;
    made.contents.push_back(values(call.dtype, count, seed, rank));
    made.inputs.push_back(
        std::make_unique<Buffer>(devices, rank, symmetric, shift, made.contents[rank]));
    size_t out = 0;
    if (call.operation == Operation::kReduceScatter) out = count * size / ranks;
    if (call.operation == Operation::kAllGather) out = count * size * ranks;
    made.outputs.push_back(std::make_unique<Buffer>(devices, rank, false, shift, Bytes(out)));
  }
  return made;
}

// Staging so small that all loops over chunks iterate many times. A slot holds at least 128 bytes
// of each partial result.
DeviceLayout random_layout(std::mt19937_64& random, int ranks, int blocks) {
  const auto partials = static_cast<unsigned>(most_partials(ranks, Reduction::kTreeSum));
  return {ranks,
          blocks,
          128u * static_cast<unsigned>((ranks + 1) / 2 + random() % 4),
          128u * (std::max(1u, partials) + static_cast<unsigned>(random() % 3)),
          static_cast<uint32_t>(random() % 600),
          64u * static_cast<unsigned>(1 + random() % 4),
          2000,
          random() % 2 == 0};
}

// As after 2^32 - `left` rounds of pushed words, of which some have not been overwritten for long.
void use_up_flags(CpuDevices& devices, uint64_t left) {
  const DeviceLayout& layout = devices.layout();
  for (int rank = 0; rank < layout.ranks; ++rank) {
    std::byte* memory = devices.seen_by(rank).memory[rank];
    for (int block = 0; block < layout.blocks; ++block) {
      layout.state(memory, block).counters.pushes = (uint64_t{7} << 32) - left;
      for (int set = 0; set < kInboxes; ++set) {
        uint64_t* words = layout.inbox(memory, block, set, 0);
        for (size_t i = 0; i < layout.ranks * layout.inbox_words(); ++i) {
          words[i] = (1 + i % 20) << 32 | 0xbad;
        }
      }
    }
  }
}

// A sequence of random calls, run twice, as a captured graph would be.
void test_random(int ranks, int blocks, int threads, uint64_t seed, int calls) {
  std::mt19937_64 random(seed);
  CpuDevices devices(random_layout(random, ranks, blocks), calls * 8192);
  if (random() % 2) use_up_flags(devices, random() % 20);
  std::vector<Case> cases;
  std::vector<std::vector<CpuLaunch>> streams(ranks);
  for (int i = 0; i < calls; ++i) {
    cases.push_back(random_case(random, devices, 4000));
    for (int rank = 0; rank < ranks; ++rank) {
      streams[rank].push_back(cases.back().launch(devices, rank));
    }
  }
  for (int replay = 0; replay < 2; ++replay) {
    run_streams(streams, blocks, threads);
    for (Case& each : cases) each.check();
  }
  for (int rank = 0; rank < ranks; ++rank) CHECK(devices.flags(rank).reported == 0);
}

// ---- failures ---------------------------------------------------------------------------------

// All-reduces of floats that are going to fail.
struct Failing {
  CpuDevices devices;
  std::vector<std::unique_ptr<Buffer>> tensors;
  std::vector<std::vector<CpuLaunch>> streams;

  // If `pushed`, one-shot all-reduces of up to 500 elements push their words.
  Failing(int ranks, Algorithm algorithm, double timeout, bool pushed = false, int blocks = 2,
          size_t count = 500)
      : devices({ranks, blocks, 256, 128, 64, 256, pushed ? 2000u : 0}, 0, timeout),
        streams(ranks) {
    for (int rank = 0; rank < ranks; ++rank) add(rank, algorithm, count);
  }
  void add(int rank, Algorithm algorithm, size_t count, Reduction reduction = Reduction::kSum,
           DType dtype = DType::kFloat32) {
    Call call{};
    call.operation = Operation::kAllReduce;
    call.dtype = dtype;
    call.algorithm = algorithm;
    call.reduction = reduction;
    call.count = count;
    tensors.push_back(
        std::make_unique<Buffer>(devices, rank, false, 0, values(dtype, count, 5, rank)));
    streams[rank].push_back(
        {plan_all_reduce(devices.seen_by(rank), call, algorithm, tensors.back()->data(), 0),
         [algorithm](CpuTeam& team, const DeviceLaunch& launch) {
           all_reduce_kernel(team, launch, algorithm);
         }});
  }
  const DeviceFailure& failure(int rank) {
    CHECK(devices.flags(rank).reported == 1);
    return devices.flags(rank).failure;
  }
};

// If a rank is late, the others report a timeout and, after a fence of each thread, poison their
// results. Their later kernels return at once, and the late rank reports the failure of a peer.
void test_late_rank(int ranks, Algorithm algorithm, bool pushed) {
  Failing job(ranks, algorithm, 1.0, pushed);
  const int late = ranks - 1;
  auto streams = job.streams;
  streams[late].clear();
  const int fences = CpuTeam::fences;
  run_streams(streams, 2, 2);
  CHECK(CpuTeam::fences - fences == late * 2 * 2);
  for (int rank = 0; rank < late; ++rank) {
    const DeviceFailure& failure = job.failure(rank);
    const bool peer_failed = failure.kind == DeviceFailureKind::kPeer;
    CHECK(peer_failed || failure.kind == DeviceFailureKind::kMissing);
    if (!peer_failed && ranks == 2) CHECK(failure.rank == late);
    CHECK(RankStatus::reason(failure.status) == Reason::kTimedOut);
    CHECK(job.tensors[rank]->poisoned());
    job.tensors[rank]->fill(Bytes(job.tensors[rank]->bytes()));
  }
  run_streams(job.streams, 2, 2);
  CHECK(job.failure(late).kind == DeviceFailureKind::kPeer);
  CHECK(RankStatus::reason(job.failure(late).status) == Reason::kTimedOut);
  for (const auto& tensor : job.tensors) CHECK(tensor->poisoned());
}

// The host stops a wait, because its own rank gives up or because a peer has died or closed.
void test_stop(uint32_t status, int culprit, bool pushed) {
  Failing job(3, pushed ? Algorithm::kOneShot : Algorithm::kTwoShot, 60, pushed);
  auto streams = job.streams;
  streams[2].clear();
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    __atomic_store_n(&job.devices.flags(0).stop, HostFlags::stop_for(culprit, status),
                     __ATOMIC_RELEASE);
  });
  run_streams(streams, 2, 2);
  host.join();
  CHECK(job.failure(0).kind == DeviceFailureKind::kStopped);
  CHECK(job.failure(0).rank == culprit && job.failure(0).status == status);
  const DeviceFailure& other = job.failure(1);
  CHECK(other.kind == DeviceFailureKind::kPeer && other.rank == 0);
  CHECK(RankStatus::reason(other.status) == RankStatus::reason(status));
  CHECK(RankStatus::culprit(other.status) == culprit);
  CHECK(job.tensors[0]->poisoned() && job.tensors[1]->poisoned());
}

// Ranks make different calls, with different grids. All of them report a mismatch between two calls
// that differ.
void test_mismatch(int ranks, uint64_t seed) {
  std::mt19937_64 random(seed);
  const size_t first_count = random() % 2 ? 400 : 700;  // Pushed, or not.
  Failing job(ranks, Algorithm::kOneShot, 60, true, 3, first_count);
  if (random() % 3 == 0) use_up_flags(job.devices, 1 + random() % 10);
  const size_t odd = random() % ranks, count = random() % 2 ? 400 : 700;
  const Algorithm usual = random() % 2 ? Algorithm::kOneShot : Algorithm::kTwoShot;
  for (int rank = 0; rank < ranks; ++rank) {
    const bool other = static_cast<size_t>(rank) == odd || random() % 3 == 0;
    constexpr size_t counts[] = {0, 10, 100, 399, 699};
    constexpr Algorithm algorithms[] = {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing};
    const size_t which = other ? random() % 10 : 10;
    job.add(rank, which >= 5 && which < 8 ? algorithms[which - 5] : usual,
            which < 5 ? counts[which] : count, which == 8 ? Reduction::kMax : Reduction::kSum,
            which == 9 ? DType::kInt32 : DType::kFloat32);
  }
  bool differ = false;
  for (int rank = 1; rank < ranks; ++rank) {
    differ = differ || !same_call(job.streams[rank].back().launch.descriptor.call,
                                  job.streams[0].back().launch.descriptor.call);
  }
  run_streams(job.streams, 3, 2);
  for (int rank = 0; rank < ranks && differ; ++rank) {
    const DeviceFailure& failure = job.failure(rank);
    CHECK(failure.kind == DeviceFailureKind::kMismatch);
    CHECK(same_call(failure.mine, job.streams[rank].back().launch.descriptor.call));
    CHECK(same_call(failure.theirs, job.streams[failure.rank].back().launch.descriptor.call));
    CHECK(!same_call(failure.mine, failure.theirs));
    CHECK(job.tensors[ranks + rank]->poisoned());
    // The previous call succeeded.
    std::vector<Bytes> inputs;
    for (int peer = 0; peer < ranks; ++peer) {
      inputs.push_back(values(DType::kFloat32, first_count, 5, peer));
    }
    CHECK(equal(job.tensors[rank]->data(), reduced(inputs, DType::kFloat32, Reduction::kSum)));
  }
}

// Two collectives of a rank run at once, as replays of graphs in different streams may: both fail,
// and so do the peers.
void test_overlap(Algorithm algorithm, bool pushed) {
  Failing job(2, algorithm, 60, pushed);
  job.add(0, algorithm, 500);
  const auto first = job.streams[0][0], second = job.streams[0][1];
  std::thread running([&] { run_stream({first}, 2, 2); });
  const DeviceRanks ranks = job.devices.seen_by(0);
  for (int block = 0; block < first.launch.blocks; ++block) {
    const uint64_t* busy = &ranks.layout.state(ranks.memory[0], block).busy;
    while (__atomic_load_n(busy, __ATOMIC_ACQUIRE) == 0) rest(10);
  }
  run_stream({second}, 2, 2);
  running.join();
  CHECK(job.failure(0).kind == DeviceFailureKind::kOverlap && job.failure(0).rank == 0);
  run_stream(job.streams[1], 2, 2);
  CHECK(job.failure(1).kind == DeviceFailureKind::kPeer && job.failure(1).rank == 0);
  for (const auto& tensor : job.tensors) CHECK(tensor->poisoned());
}

// A team whose clock jumps back once, and then past the timeout. If `arrives`, the awaited counter
// is raised at the same moment.
class JumpingTeam : public CpuTeam {
 public:
  JumpingTeam(CpuBlock& shared, uint64_t& sent, bool arrives)
      : CpuTeam(shared, 0, 0, 1), sent_(sent), arrives_(arrives) {}

  uint64_t now() {
    const uint64_t begin = uint64_t{1} << 40, second = 1000000000;
    if (++calls_ <= 2) return begin - (calls_ - 1) * second;
    __atomic_store_n(&sent_, arrives_ ? 1 : 0, __ATOMIC_RELEASE);
    return begin + 1000 * second;
  }
  int calls() const { return calls_; }

 private:
  uint64_t& sent_;
  const bool arrives_;
  int calls_ = 0;
};

// A wait that is fulfilled just as its timeout expires succeeds.
void test_last_check_at_timeout(bool arrives) {
  CpuDevices devices({2, 1, 256, 128, 64, 64, 0}, 0, 1.0);
  CpuBlock block(1);
  DeviceLaunch launch{};
  launch.ranks = devices.seen_by(0);
  JumpingTeam team(block, devices.layout().cell(launch.ranks.memory[0], 0, 1).reduce_sent, arrives);
  BlockCollective<JumpingTeam> collective(team, launch);
  CHECK(collective.wait_reduced(1, 0) == arrives);
  CHECK(team.calls() == 3);
  CHECK((devices.flags(0).reported != 0) == !arrives);
}

}  // namespace

// device_collectives_test [BATCHES [ONE_IN]]: runs BATCHES sequences of random calls. With ONE_IN,
// delays threads randomly at one in ONE_IN of the points where they synchronise.
int main(int argc, char** argv) {
  const int batches = argc > 1 ? std::atoi(argv[1]) : 16;
  fuzz_one_in = argc > 2 ? std::atoi(argv[2]) : 0;
  for (int i = 0; i < batches; ++i) {
    const int ranks = 1 + i % 8, blocks = 1 + i % 3, threads = 1 + i / 3 % 2;
    test_random(ranks, blocks, threads, 1000 * batches + i, 12);
  }
  for (int i = 0; i < 2 * batches; ++i) test_mismatch(2 + i % 4, i);
  if (fuzz_one_in > 0) return 0;
  for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing}) {
    for (const bool pushed : {false, algorithm == Algorithm::kOneShot}) {
      test_late_rank(2 + static_cast<int>(algorithm), algorithm, pushed);
      test_overlap(algorithm, pushed);
    }
  }
  for (const bool pushed : {false, true}) {
    test_stop(RankStatus::failed(Reason::kDied, 2), 2, pushed);
    test_stop(RankStatus::failed(Reason::kAborted, 0), 0, pushed);
    test_stop(RankStatus::kClosed, 2, pushed);
  }
  test_last_check_at_timeout(true);
  test_last_check_at_timeout(false);
  return 0;
}
