// Channels on the fake CUDA runtime, in random programs. Their memory is kept and given back as
// pipekernels/device/channel.py does it. The fake checks at every access, by vector clocks, that it
// comes after all that it must come after, whatever the order in which streams happen to run; and
// the values are checked in the order in which they do run, with random delays.

#include "../cuda/p2p_copy/p2p_copy.cu"

#include <sys/wait.h>

#include <deque>
#include <random>
#include <thread>

#include "device_blocks.h"
#include "transfer_times.h"

namespace pipekernels {

namespace {

constexpr size_t kSlotBytes = 96;

template <class Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  CHECK(!"nothing has been thrown");
  return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

using Memory = std::vector<std::shared_ptr<char>>;

// What a transfer gave its receiver.
struct Received {
  std::vector<Patterned> tensors;
  Memory memory;
  P2PEvent pending;
  std::vector<void*> users;
  bool in_use = true;
};

// An channel, and who holds which memory until which event: see device/channel.py.
class Owner {
 public:
  Owner(Blocks& blocks, int source, int target)
      : channel(source, target, kSlotBytes), source(source), target(target), blocks_(blocks) {}
  ~Owner() { settle(); }

  // `memory`: of the tensors, empty if it is not to be kept.
  std::shared_ptr<Received> send(const std::vector<Patterned>& tensors, Memory memory, void* origin,
                                 bool snapshot) {
    let_go_of_sources();
    take_back_buffers();
    const auto received = std::make_shared<Received>();
    std::vector<TensorCopy> copies;
    std::vector<char*> snapshots;
    for (const Patterned& tensor : tensors) {
      received->memory.push_back(blocks_.take(target, channel.arriving()));
      if (snapshot) {
        memory.push_back(blocks_.take(source, origin));
        snapshots.push_back(memory.back().get());
      }
      Patterned copy = tensor;
      copy.memory = received->memory.back().get();
      copy.strides = dense_strides(tensor);
      received->tensors.push_back(copy);
      copies.push_back({tensor.memory, copy.memory, tensor.item_size, tensor.shape, tensor.strides,
                        copy.strides});
    }
    const bool still_reads = channel.send(received->pending, copies, snapshots, origin, 1);
    if (source != kHost || still_reads) {
      sources_.push_back({origin, received->pending, std::move(memory)});
    }
    lent_.push_back(received);
    return received;
  }

  void settle() {
    if (source == kHost) {
      for (const Sources& each : sources_) each.done.synchronize();
    }
    let_go_of_sources();
    take_back_buffers();
    take_back_buffers();
    if (target == kHost) CHECK(cudaStreamSynchronize(leaving()) == cudaSuccess);
    take_back_buffers();
    CHECK(sources_.empty() && unused_.empty());
  }

  cudaStream_t leaving() const { return static_cast<cudaStream_t>(channel.leaving()); }
  size_t lent() const { return lent_.size(); }

  P2PChannel channel;
  const int source, target;

 private:
  struct Sources {
    void* origin;
    P2PEvent done;
    Memory memory;
  };

  // The source's strides if they are dense, else those of a contiguous tensor.
  static std::vector<int64_t> dense_strides(const Patterned& tensor) {
    std::vector<int64_t> strides(tensor.shape.size());
    int64_t next = 1;
    for (size_t d = strides.size(); d-- > 0; next *= tensor.shape[d]) strides[d] = next;
    const bool transposed =
        tensor.shape.size() == 2 && tensor.strides[0] == 1 && tensor.strides[1] == tensor.shape[0];
    return transposed ? tensor.strides : strides;
  }

  void let_go_of_sources() {
    for (; !sources_.empty(); sources_.pop_front()) {
      const Sources& first = sources_.front();
      if (!(source == kHost ? first.done.is_done() : first.done.wait(source, first.origin))) return;
    }
  }

  void take_back_buffers() {
    for (; !unused_.empty(); unused_.pop_front()) {
      CHECK(unused_.front().first.wait(target, channel.arriving()));
    }
    for (auto each = lent_.begin(); each != lent_.end();) {
      const auto received = *each;
      P2PEvent used;
      const bool free =
          !received->in_use &&
          (target == kHost ? received->pending.is_done() : channel.mark(used, received->users));
      if (!free) {
        ++each;
        continue;
      }
      if (target != kHost) unused_.push_back({used, std::move(received->memory)});
      each = lent_.erase(each);
    }
  }

  Blocks& blocks_;
  std::deque<Sources> sources_;
  std::vector<std::shared_ptr<Received>> lent_;
  std::deque<std::pair<P2PEvent, Memory>> unused_;
};

cudaStream_t stream_on(int device) {
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  return stream;
}

// A program of a seed.
class Program {
 public:
  explicit Program(unsigned seed) : random_(seed), blocks_(std::make_unique<Blocks>()) {
    auto& device = fake_cuda::device();
    device.peers = draw(2) != 0;
    device.driver_version = draw(2) != 0 ? 13000 : 12060;
    device.one_queue = draw(4) == 0;
    using fake_cuda::Fault;
    constexpr decltype(Fault::kind) kinds[] = {Fault::kNone, Fault::kDropped, Fault::kLate,
                                               Fault::kCorrupt};
    fake_cuda::fault = {kinds[draw(4)], 0, 1};
    for (int d = 0; d < fake_cuda::kDevices; ++d) {
      streams_[d][1] = stream_on(d);  // The first one is the default stream.
    }
    const std::pair<int, int> routes[] = {{0, 1}, {1, 0}, {0, kHost}, {kHost, 1}, {1, 2}, {0, 1}};
    for (const auto& [source, target] : routes) {
      edges_.push_back(std::make_unique<Owner>(*blocks_, source, target));
      const bool faulty = device.peers && fake_cuda::fault.kind != Fault::kNone;
      CHECK(edges_.back()->channel.has_broken_link() == (faulty && source == 0 && target == 1));
    }
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      const unsigned what = draw(10);
      if (what < 4) send();
      if (what >= 4 && what < 7) use();
      if (what == 7 || what == 8) drop();
      if (what == 9) edges_[draw(edges_.size())]->settle();
      CHECK(fake_cuda::current_device == 0);
    }
    for (const auto& channel : edges_) channel->settle();
    for (const auto& [channel, received] : received_) received->in_use = false;
    for (const auto& channel : edges_) {
      channel->settle();
      CHECK(channel->lent() == 0);
    }
    received_.clear();
    edges_.clear();
    const auto& device = fake_cuda::device();
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(device.events.empty());
    blocks_.reset();
    CHECK(device.memory.empty() && device.pinned.empty());
    fake_cuda::late_writes.clear();
    fake_cuda::fault = {};
  }

 private:
  size_t draw(size_t choices) { return random_() % choices; }

  Patterned random_tensor(char* memory) {
    static constexpr int64_t kItems[] = {1, 2, 4, 8, 16};
    Patterned tensor{memory, {}, {}, kItems[draw(5)], static_cast<unsigned>(random_())};
    const auto n = static_cast<int64_t>(draw(9)), m = static_cast<int64_t>(1 + draw(7));
    switch (draw(6)) {
      case 0:
        tensor.shape = {n};
        tensor.strides = {1};
        break;
      case 1:  // Transposed.
        tensor.shape = {n, m};
        tensor.strides = {1, n};
        break;
      case 2:  // With holes.
        tensor.shape = {n, m};
        tensor.strides = {2 * m, 2};
        break;
      case 3:  // A part, of three dimensions.
        tensor.shape = {n % 4, 2, m % 4};
        tensor.strides = {2 * m, m, 1};
        break;
      case 4:  // Of no dimensions.
        break;
      default:
        tensor.shape = {n, m};
        tensor.strides = {m, 1};
    }
    return tensor;
  }

  void send() {
    Owner& channel = *edges_[draw(edges_.size())];
    const bool on_host = channel.source == kHost, pinned = draw(2) != 0;
    void* const origin = on_host ? nullptr : streams_[channel.source][draw(2)];
    const bool snapshot = !on_host && channel.target != kHost && draw(2) != 0;
    std::vector<Patterned> tensors;
    Memory memory;
    for (size_t count = draw(9); count > 0; --count) {
      memory.push_back(on_host && !pinned
                           ? std::shared_ptr<char>(new char[kBlock], std::default_delete<char[]>())
                           : blocks_->take(channel.source, origin));
      tensors.push_back(random_tensor(memory.back().get()));
      on_host ? fill_on_host(tensors.back()) : fill_in(channel.source, origin, tensors.back());
    }
    // Memory that the channel need not keep may be overwritten at once.
    const bool keeps = !snapshot && !(on_host && !pinned);
    received_.push_back(
        {&channel, channel.send(tensors, keeps ? memory : Memory(), origin, snapshot)});
    if (keeps) return;
    for (Patterned tensor : tensors) {
      ++tensor.seed;
      if (on_host) {
        tensor.fill();
      } else {
        fill_in(channel.source, origin, tensor);
      }
    }
  }

  void use() {
    if (received_.empty()) return;
    const auto& [channel, received] = received_[draw(received_.size())];
    void* stream = nullptr;
    if (channel->target == kHost) {
      received->pending.synchronize();
    } else {
      stream = streams_[channel->target][draw(2)];
      CHECK(received->pending.wait(channel->target, stream));
      // A receiver that used the copy in another stream, and writes to it, orders both.
      for (void* other : received->users) follow(stream, other, channel->target);
      received->users.push_back(stream);
    }
    for (Patterned& tensor : received->tensors) {
      channel->target == kHost ? check_on_host(tensor) : check_in(channel->target, stream, tensor);
      if (draw(3) != 0) continue;
      ++tensor.seed;
      channel->target == kHost ? fill_on_host(tensor) : fill_in(channel->target, stream, tensor);
    }
  }

  void follow(void* later, void* earlier, int device) {
    const DeviceGuard guard(device);
    cudaEvent_t event = nullptr;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    CHECK(cudaEventRecord(event, static_cast<cudaStream_t>(earlier)) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event, 0) == cudaSuccess);
    CHECK(cudaEventDestroy(event) == cudaSuccess);
  }

  void drop() {
    if (received_.empty()) return;
    const size_t i = draw(received_.size());
    received_[i].second->in_use = false;
    received_.erase(received_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  std::minstd_rand random_;
  std::unique_ptr<Blocks> blocks_;
  cudaStream_t streams_[fake_cuda::kDevices][2] = {};
  std::vector<std::unique_ptr<Owner>> edges_;
  std::vector<std::pair<Owner*, std::shared_ptr<Received>>> received_;
};

void test_random_programs(unsigned seeds) {
  fuzz_one_in = 6;
  for (unsigned seed = 0; seed < seeds; ++seed) {
    Program(seed).run(80);
    fake_cuda::device_pointer().reset();
  }
}

// The fake aborts where the real runtime might read or write too early.
void test_the_fake() {
  const auto aborts = [](const auto& body) {
    const pid_t child = fork();
    if (child == 0) {
      std::fclose(stderr);
      const cudaStream_t here = stream_on(0), there = stream_on(1);
      void *memory = nullptr, *pinned = nullptr;
      CHECK(cudaMalloc(&memory, 64) == cudaSuccess);
      CHECK(cudaHostAlloc(&pinned, 64, 0) == cudaSuccess);
      body(here, there, memory, pinned);
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status);
  };
  const auto copy = [](void* target, void* source, cudaStream_t stream) {
    cudaMemcpyAsync(target, source, 64, cudaMemcpyDefault, stream);
  };
  CHECK(!aborts([&](auto here, auto, void* memory, void* pinned) {
    copy(memory, pinned, here);
    copy(pinned, memory, here);
    CHECK(cudaStreamSynchronize(here) == cudaSuccess);
    fake_cuda::give_back({pinned, 64}, nullptr);
  }));
  CHECK(aborts([&](auto here, auto, void* memory, void* pinned) {
    copy(memory, pinned, here);
    copy(pinned, memory, stream_on(0));
  }));
  CHECK(aborts([&](auto here, auto, void* memory, void* pinned) {
    copy(memory, pinned, here);
    fake_cuda::give_back({pinned, 64}, nullptr);
  }));
  CHECK(aborts([&](auto here, auto, void* memory, void*) {
    char ordinary[64];
    copy(memory, ordinary, here);
  }));
  CHECK(aborts([&](auto, auto there, void* memory, void* pinned) { copy(memory, pinned, there); }));
}

Patterned contiguous(char* memory, int64_t elements, unsigned seed) {
  return {memory, {elements}, {1}, 4, seed};
}

void test_captures() {
  Blocks blocks;
  const cudaStream_t here = stream_on(0), there = stream_on(1), other = stream_on(0);
  Owner owner(blocks, 0, 1);
  CHECK(owner.channel.has_peer_access());
  const auto memory = blocks.take(0, here);
  const Patterned tensor = contiguous(memory.get(), 100, 1);
  fill_in(0, here, tensor);
  const auto received = owner.send({tensor}, {memory}, here, false);
  here->begin_capture();
  const auto told = thrown([&] { owner.send({tensor}, {memory}, here, false); });
  CHECK(has(told, "the current stream of cuda:0 is being captured; copy before the capture"));
  CHECK(!received->pending.wait(0, here));
  // The first source is kept meanwhile, as its stream cannot wait, and other streams may send.
  const auto more = blocks.take(0, other);
  const Patterned second = contiguous(more.get(), 9, 2);
  fill_in(0, other, second);
  owner.send({second}, {more}, other, false)->in_use = false;
  CHECK(here->end_capture().empty());
  // A stream that used a buffer is captured: the buffer is not free yet.
  CHECK(received->pending.wait(1, there));
  received->users.push_back(there);
  check_in(1, there, received->tensors[0]);
  received->in_use = false;
  there->begin_capture();
  owner.settle();
  CHECK(owner.lent() == 1);
  CHECK(there->end_capture().empty());
  owner.settle();
  CHECK(owner.lent() == 0);
}

// After an error, memory may be given back at once.
void test_failures() {
  for (const bool peers : {true, false}) {
    int failed = 0;
    for (int copies = 0; copies < 12; ++copies) {
      auto& device = fake_cuda::device();
      device.peers = peers;
      device.driver_version = 12000;  // No batches.
      Blocks blocks;
      P2PChannel channel(0, 1, kSlotBytes);
      const cudaStream_t here = stream_on(0);
      const auto from = blocks.take(0, here), to = blocks.take(1, channel.arriving());
      fill_in(0, here, contiguous(from.get(), 80, 3));
      const TensorCopy first{from.get(), to.get(), 4, {40}, {1}, {1}};
      const TensorCopy second{from.get() + 160, to.get() + 160, 4, {40}, {1}, {1}};
      device.copies_until_failure = copies;
      P2PEvent event;
      try {
        channel.send(event, {first, second}, {}, here, 1);
        event.synchronize();
        check_on_host(contiguous(to.get(), 80, 3));
      } catch (const std::runtime_error& error) {
        CHECK(has(error.what(), "cudaMemcpyAsync failed"));
        ++failed;
      }
      device.copies_until_failure = -1;
      for (const auto& memory : {from, to}) fake_cuda::give_back({memory.get(), kBlock}, nullptr);
      CHECK(fake_cuda::current_device == 0);
    }
    CHECK(failed == (peers ? 2 : 10));  // Four slots, one with parts of both, each in and out.
    fake_cuda::device_pointer().reset();
  }
}

void test_bad_arguments() {
  CHECK(has(thrown([] { P2PChannel(0, 0, 96); }), "a channel needs two devices"));
  CHECK(has(thrown([] { P2PChannel(kHost, kHost, 96); }), "got -1, -1 and 96"));
  CHECK(has(thrown([] { P2PChannel(0, 1, 20); }), "slots of a multiple of 16 bytes"));
  char memory[64] = {};
  const auto plan = [&](TensorCopy tensor) { return thrown([&] { plan_transfer({tensor}); }); };
  CHECK(has(plan({memory, memory, 4, {2}, {1, 1}, {1}}), "its source has 2 and its target 1"));
  CHECK(has(plan({memory, memory, 4, {2}, {-1}, {1}}), "negative size or stride"));
  CHECK(has(plan({memory, memory, 4, {2}, {1}, {2}}), "a target that is not dense"));
  CHECK(has(plan({memory, memory, 32, {2}, {1}, {1}}), "must be 1 to 16"));
  CHECK(
      has(plan({memory, memory, 4, {1LL << 40, 1LL << 40}, {0, 1}, {1LL << 40, 1}}), "too large"));
  P2PChannel channel(0, 1, 96);
  P2PEvent event;
  CHECK(has(thrown([&] { channel.send(event, {}, {memory}, nullptr, 1); }), "a snapshot on the"));
}

// Several threads send through one channel and let go of each other's events.
void test_threads() {
  auto& device = fake_cuda::device();
  Blocks blocks;
  P2PChannel channel(kHost, 1, kSlotBytes);
  std::mutex mutex;
  std::vector<P2PEvent> events;
  std::vector<std::shared_ptr<char>> targets;
  for (int i = 0; i < 3; ++i) targets.push_back(blocks.take(1, channel.arriving()));
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      char source[400];
      for (int round = 0; round < 30; ++round) {
        Patterned tensor = contiguous(source, 100, static_cast<unsigned>(3 * round + i));
        tensor.fill();
        P2PEvent event;
        channel.send(event, {{source, targets[i].get(), 4, {100}, {1}, {1}}}, {}, nullptr, 1);
        event.synchronize();
        tensor.memory = targets[i].get();
        tensor.check();
        const std::lock_guard<std::mutex> hold(mutex);
        if (events.size() > 4) events.clear();
        events.push_back(event);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  events.clear();
  CHECK(device.events.size() < 30);  // They are used again.
}

}  // namespace
}  // namespace pipekernels

// With the argument `times`, prints host times; with a number, runs so many random programs.
int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "times") == 0) {
    pipekernels::print_transfer_times(pipekernels::stream_on);
    return 0;
  }
  pipekernels::test_the_fake();  // First, since a process with threads must not fork.
  pipekernels::test_bad_arguments();
  pipekernels::test_captures();
  pipekernels::check_calls(pipekernels::stream_on);
  pipekernels::test_failures();
  fake_cuda::device_pointer().reset();
  pipekernels::test_threads();
  fake_cuda::device_pointer().reset();
  pipekernels::test_random_programs(argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 40);
}
