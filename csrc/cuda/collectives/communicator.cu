#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "host/runtime.cuh"
#include "pipekernels/collectives/all_gather.h"
#include "pipekernels/collectives/communicator.h"
#include "pipekernels/collectives/cuda_communicator.h"
#include "pipekernels/shared_memory/process.h"
#include "shared_memory/owned_memory.cuh"

namespace pipekernels {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kSetBytes = 128 << 10;
constexpr uint32_t kSlotBytes = 16 << 10;
constexpr uint32_t kMinChunkBytes = 16 << 10;  // Smallest chunk: two 16-byte packs per thread.
constexpr uint32_t kInboxBytes = 4 << 10;      // Four words of data for each thread.

// How long the watcher thread sleeps between checks of the peers, as kPollInterval in
// csrc/cpu/collectives/communicator.cpp.
constexpr std::chrono::milliseconds kPollInterval{20};
// How long the watcher waits before it stops kernels, and tear_down() for peers to unmap memory. A
// rank may leave, having sent its last signals and seen those of a third rank, while the latter
// have not yet reached this rank, so this rank's kernels may still succeed.
constexpr std::chrono::milliseconds kGrace{200};

KernelList all_kernels() {
  KernelList kernels;
  add_all_reduce_kernels(kernels);
  add_reduce_scatter_kernels(kernels);
  add_all_gather_kernels(kernels);
  add_broadcast_kernels(kernels);
  return kernels;
}

// Loads all kernels now, since loading one later could wait for a running kernel that waits for
// this rank. Throws if the build has no code for this device.
void load_kernels() {
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();
      throw std::runtime_error(
          "this build of pipekernels has no code for its GPU; rebuild it with the GPU's "
          "architecture in CUDAARCHS");
    }
    check_cuda(status, "loading a kernel");
  }
}

}  // namespace

// ---- set-up -----------------------------------------------------------------------------------

// What the ranks tell each other during set-up.
struct CudaCommunicator::SetupMessage {
  char problem[200];  // The error message if set-up has failed on this rank, else empty.
  cudaUUID_t device;
  int32_t multiprocessors;
  int32_t most_blocks;
  int32_t parents_rank;                   // In the parent whose heap it can share, or -1.
  cudaIpcMemHandle_t handle;              // If the ranks are processes.
  std::shared_ptr<DeviceMemory>* memory;  // If they are threads; valid until the next exchange().
};

struct CudaCommunicator::Events {
  cudaEvent_t last = nullptr;  // The end of the last collective that was not captured.
  bool recorded = false;
  ~Events() {
    if (last) cudaEventDestroy(last);
  }
};

void CudaCommunicator::FreeFlags::operator()(HostFlags* flags) const {
  if (process != process_generation()) return;
  const LaunchesPaused paused;
  cudaFreeHost(flags);
}

CudaCommunicator::CudaCommunicator(Communicator& core, int device, size_t symmetric_bytes,
                                   int most_blocks, CudaCommunicator* parent)
    : core_(core), device_(device), process_(process_generation()), segment_(core.segment()) {
  core.check();  // A closed communicator has no segment.
  try {
    wake_ = eventfd(0, EFD_CLOEXEC);
    if (wake_ < 0) throw std::runtime_error("eventfd failed");
    set_up(symmetric_bytes, most_blocks, parent);
  } catch (...) {
    tear_down();
    throw;
  }
  watcher_ = std::make_unique<std::thread>([this] { watch(); });
}

void CudaCommunicator::set_up(size_t symmetric_bytes, int most_blocks, CudaCommunicator* parent) {
  if (core_.world_size() > kMaxDeviceRanks) {
    throw std::runtime_error("CUDA collectives take at most " + std::to_string(kMaxDeviceRanks) +
                             " ranks of one host, got " + std::to_string(core_.world_size()));
  }
  ranks_.rank = core_.rank();
  ranks_.timeout = static_cast<uint64_t>(core_.timeout().count() * 1e9);
  const bool shares = parent != nullptr && parent->device_ == device_;
  agree_on_layout(most_blocks, shares ? parent->shared_memory() : SymmetricMemory{});
  share_memory(symmetric_bytes);
}

SymmetricMemory CudaCommunicator::shared_memory() {
  const auto hold = lock();
  return closed_ ? SymmetricMemory{} : symmetric_;
}

// Gathers the messages of all ranks. Throws on all ranks if one of them reports a problem.
void CudaCommunicator::exchange(SetupMessage& mine, std::vector<SetupMessage>& all) {
  all.resize(core_.world_size());
  all_gather(core_, &mine, all.data(), sizeof(SetupMessage), DType::kUInt8);
  std::string problems;
  for (int rank = 0; rank < core_.world_size(); ++rank) {
    if (all[rank].problem[0] == '\0') continue;
    problems += (problems.empty() ? "" : "; ") + rank_name(rank) + ": " + all[rank].problem;
  }
  if (!problems.empty()) throw std::runtime_error("the ranks cannot use CUDA: " + problems);
}

namespace {

template <class Work>
void record_error(char (&problem)[200], Work work) {
  try {
    work();
  } catch (const std::exception& error) {
    std::snprintf(problem, sizeof(problem), "%s", error.what());
  }
}

}  // namespace

// If all ranks can share their parents' heaps, they do.
void CudaCommunicator::agree_on_layout(int most_blocks, SymmetricMemory parents) {
  SetupMessage mine{};
  mine.most_blocks = most_blocks;
  mine.parents_rank = parents.heap ? parents.rank : -1;
  record_error(mine.problem, [&] {
    const LaunchesPaused paused;
    const DeviceGuard guard(device_);
    load_kernels();
    void* flags = nullptr;
    check_cuda(
        cudaHostAlloc(&flags, sizeof(HostFlags), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
    flags_.reset(new (flags) HostFlags{});
    void* device_pointer = nullptr;
    check_cuda(cudaHostGetDevicePointer(&device_pointer, flags, 0), "cudaHostGetDevicePointer");
    ranks_.host = static_cast<HostFlags*>(device_pointer);
    events_ = std::make_unique<Events>();
    check_cuda(cudaEventCreateWithFlags(&events_->last, cudaEventDisableTiming), "cudaEventCreate");
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    mine.device = properties.uuid;
    mine.multiprocessors = properties.multiProcessorCount;
  });
  std::vector<SetupMessage> all;
  exchange(mine, all);
  // The blocks of all ranks on a device must be resident together, or they would wait for blocks
  // that cannot start. So a device runs at most one block per multiprocessor.
  int blocks = std::min(most_blocks, kMaxDeviceBlocks);
  for (const SetupMessage& each : all) {
    if (each.most_blocks != all[0].most_blocks) {
      throw std::runtime_error("device_blocks must be the same on all ranks, got " +
                               std::to_string(all[0].most_blocks) + " on rank 0 and " +
                               std::to_string(each.most_blocks) + " on rank " +
                               std::to_string(&each - all.data()));
    }
    const auto sharers = std::count_if(all.begin(), all.end(), [&](const SetupMessage& other) {
      return std::memcmp(&other.device, &each.device, sizeof(each.device)) == 0;
    });
    if (each.parents_rank < 0) parents = {};
    blocks = std::min(blocks, each.multiprocessors / static_cast<int>(sharers));
  }
  if (blocks < 1) throw std::runtime_error("more ranks share a GPU than it has multiprocessors");
  const int n = core_.world_size();
  for (int rank = 0; rank < n; ++rank) {
    symmetric_.owners[rank] = parents.heap ? parents.owners[all[rank].parents_rank] : rank;
  }
  symmetric_.rank = core_.rank();
  symmetric_.heap = std::move(parents.heap);
  symmetric_.mapped = std::move(parents.mapped);
  ranks_.layout = {n, blocks, kSetBytes, kSlotBytes, kMinChunkBytes, kInboxBytes, push_limit(n)};
}

void CudaCommunicator::share_memory(size_t symmetric_bytes) {
  const size_t begin = (ranks_.layout.heap() + 511) / 512 * 512;
  const size_t heap = symmetric_.heap ? 0 : CudaHeap::first_bytes(symmetric_bytes);
  memory_ = std::make_shared<MappedMemory>(device_, segment_, core_.rank());
  std::shared_ptr<DeviceMemory>& own = memory_->own;
  SetupMessage mine{};
  record_error(mine.problem, [&] {
    const DeviceGuard guard(device_);
    own = std::make_shared<DeviceMemory>(device_, begin + heap,
                                         core_.is_threads() ? nullptr : segment_, core_.rank());
    if (!symmetric_.heap) {
      symmetric_.heap = std::make_shared<CudaHeap>(own, begin, symmetric_bytes, device_, core_);
      symmetric_.mapped = memory_;
    }
    const LaunchesPaused paused;
    check_cuda(cudaMemset(own->base(), 0, ranks_.layout.control_bytes()), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    mine.memory = &own;
    if (!core_.is_threads()) {
      check_cuda(cudaIpcGetMemHandle(&mine.handle, own->base()), "cudaIpcGetMemHandle");
    }
  });
  std::vector<SetupMessage> all;
  exchange(mine, all);

  segment_->growth(core_.rank()).forget();
  SetupMessage outcome{};
  record_error(outcome.problem, [&] {
    const DeviceGuard guard(device_);
    segment_->state(core_.rank()).device_mapper.store(getpid(), std::memory_order_release);
    for (int peer = 0; peer < core_.world_size(); ++peer) {
      if (peer == core_.rank()) {
        memory_->bases[peer] = own->base();
      } else if (core_.is_threads()) {
        memory_->bases[peer] = memory_->adopt(*all[peer].memory);
      } else {
        memory_->bases[peer] = memory_->open(peer, all[peer].handle);
      }
      ranks_.memory[peer] = memory_->bases[peer];
      ranks_.heap[0][peer] = symmetric_.mapped->bases[symmetric_.owners[peer]];
    }
  });
  exchange(outcome, all);
}

// ---- calls ------------------------------------------------------------------------------------

std::unique_ptr<CudaBuffer> CudaCommunicator::allocate(size_t bytes, void* stream) {
  const auto hold = lock();
  require_usable();
  const DeviceGuard guard(device_);
  std::byte* data = symmetric_.heap->allocate(bytes, stream);
  return data ? std::make_unique<CudaBuffer>(symmetric_.heap, data, bytes) : nullptr;
}

uint64_t CudaCommunicator::location_of(const void* data, size_t bytes, void* stream) {
  const auto hold = lock();
  if (!symmetric_.heap) return 0;
  // A captured launch, which may be replayed in place of a later one, keeps the addresses that were
  // known then. So after the first nothing is learnt.
  if (symmetric_.has_grown(world_size()) && !captured_ && !is_capturing(stream)) {
    symmetric_.learn(core_, ranks_, launches_);
  }
  return symmetric_.location_of(core_, data, bytes, launches_);
}

void CudaCommunicator::check() {
  const auto hold = lock();
  require_usable();
}

std::unique_lock<std::mutex> CudaCommunicator::lock() {
  // In a forked child, throw instead of waiting: the thread that holds the lock does not exist.
  if (process_ != process_generation()) core_.check();
  return std::unique_lock<std::mutex>(mutex_);
}

void CudaCommunicator::require_usable() {
  core_.check();  // Throws if closed, failed before, or forked.
  if (closed_) throw std::runtime_error("this communicator has been closed; make a new one");
  if (!failed_ && __atomic_load_n(&flags_->reported, __ATOMIC_ACQUIRE) != 0) throw_failure();
}

void CudaCommunicator::throw_failure() {
  failed_ = true;
  const DeviceFailure& failure = flags_->failure;
  const std::string text = describe(failure.mine);
  const std::string limit = " within " + format_seconds(core_.timeout());
  try {
    switch (failure.kind) {
      case DeviceFailureKind::kMissing:
        throw TimeoutError(failure.rank, rank_name(failure.rank) + " of " +
                                             std::to_string(world_size()) + " did not arrive at " +
                                             text + " on its device" + limit + advice());
      case DeviceFailureKind::kMismatch: {
        const bool first = rank() < failure.rank;
        const Call calls[] = {first ? failure.mine : failure.theirs,
                              first ? failure.theirs : failure.mine};
        const int ranks[] = {std::min(rank(), failure.rank), std::max(rank(), failure.rank)};
        throw MismatchError(describe_mismatch(calls, ranks, 2));
      }
      case DeviceFailureKind::kOverlap:
        throw std::runtime_error(
            text +
            " began while another collective of this rank still ran: a CUDA graph that has "
            "captured collectives was replayed in a stream that does not wait for them; call "
            "stream.wait_stream(other) before the replay, and after it before other collectives");
      default:
        throw_peer_failure(failure.rank, failure.status);
    }
  } catch (const PeerError& error) {
    core_.fail_externally(error.reason, error.rank, error.what());
    throw;
  } catch (const TimeoutError& error) {
    core_.fail_externally(Reason::kTimedOut, error.rank, error.what());
    throw;
  } catch (const MismatchError& error) {
    core_.fail_externally(Reason::kMismatched, failure.rank, error.what());
    throw;
  } catch (const std::runtime_error& error) {
    core_.fail_externally(Reason::kAborted, rank(), error.what());
    throw;
  }
}

// For timeouts of ranks that are threads: settings that may have kept a rank from arriving.
const char* CudaCommunicator::advice() const {
  if (!core_.is_threads()) return "";
  return "; ranks that are threads need CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment, and a "
         "backward that has collectives needs torch.autograd.set_multithreading_enabled(False)";
}

void CudaCommunicator::synchronize() {
  const auto hold = lock();
  require_usable();
  const DeviceGuard guard(device_);
  if (events_->recorded) check_cuda(cudaEventSynchronize(events_->last), "a collective");
  require_usable();
}

void CudaCommunicator::launch(const void* kernel, const DeviceLaunch& launch,
                              const CudaCaller& caller) {
  const auto hold = lock();
  require_usable();
  if (core_.is_threads() && caller.may_meet) {
    launch_together(kernel, launch, caller.stream);
  } else {
    enqueue(kernel, launch, caller.stream);
    record(caller.stream);
  }
}

void CudaCommunicator::enqueue(const void* kernel, const DeviceLaunch& launch, void* stream) {
  const DeviceGuard guard(device_);
  // Only its graph orders a captured launch. The others wait for the event in the same stream too:
  // an equal handle may be that of another stream, made after the first was destroyed.
  const bool captured = is_capturing(stream);
  if (!captured && events_->recorded) {
    check_cuda(cudaStreamWaitEvent(stream_of(stream), events_->last, 0), "cudaStreamWaitEvent");
  }
  void* arguments[] = {const_cast<DeviceLaunch*>(&launch)};
  check_cuda(cudaLaunchKernel(kernel, dim3(launch.blocks), dim3(kDeviceThreads), arguments, 0,
                              stream_of(stream)),
             "launching a collective");
  symmetric_.heap->use(launch.input, stream, captured);
  symmetric_.heap->use(launch.output, stream, captured);
  captured_ = captured_ || captured;
  launches_ += !captured;
}

void CudaCommunicator::record(void* stream) {
  if (is_capturing(stream)) return;
  const DeviceGuard guard(device_);
  check_cuda(cudaEventRecord(events_->last, stream_of(stream)), "cudaEventRecord");
  events_->recorded = true;
}

// The ranks synchronise on the CPU before the launch, when each has issued its earlier work, and
// after it, so that no rank issues anything else until all have launched. That includes the event
// record: it waits for the kernel, and could block later work of other streams that share a
// hardware queue with it. As the location of its data, each rank passes its stream: two kernels in
// the same stream would run one after the other, and the first would wait forever.
void CudaCommunicator::launch_together(const void* kernel, const DeviceLaunch& launch,
                                       void* stream) {
  // The handles of default streams, 0 to 2, are the same on every device.
  auto key = reinterpret_cast<uintptr_t>(stream);
  if (key <= 2) key = static_cast<uintptr_t>(device_ + 1) << 8;
  const auto body = [&](Collective& collective) {
    collective.signal();
    collective.wait();
    for (int a = 0; a < world_size(); ++a) {
      for (int b = 0; b < a; ++b) {
        if (collective.data_of(a) != collective.data_of(b)) continue;
        throw MismatchError("ranks " + std::to_string(b) + " and " + std::to_string(a) +
                            " are threads that use the same CUDA stream, in which their kernels "
                            "would wait for each other forever; let each rank work in a stream of "
                            "its own: with torch.cuda.stream(torch.cuda.Stream())");
      }
    }
    const std::shared_lock<std::shared_mutex> launching(launch_mutex());
    enqueue(kernel, launch, stream);
    try {
      collective.signal();
      collective.wait();
    } catch (...) {
      record(stream);
      throw;
    }
    record(stream);
  };
  const Call call = on_cuda(launch.descriptor.call);
  run_collective(core_, call, reinterpret_cast<void*>(key), 0, body);
}

// ---- watching ---------------------------------------------------------------------------------

void CudaCommunicator::stop(int rank, uint32_t status) {
  __atomic_store_n(&flags_->stop, HostFlags::stop_for(rank, status), __ATOMIC_RELEASE);
}

// The watcher thread. Stops this rank's kernels when a peer has died, closed or failed. Ends then,
// or when this rank closes.
void CudaCommunicator::watch() {
  std::vector<pollfd> polls{{wake_, POLLIN, 0}};
  for (const int fd : core_.pidfds()) polls.push_back({fd, POLLIN, 0});  // -1 is ignored.
  int culprit = -1;
  uint32_t status = RankStatus::kOpen;
  while (status == RankStatus::kOpen) {
    poll(polls.data(), polls.size(), static_cast<int>(kPollInterval.count()));
    if (polls[0].revents != 0) return;
    for (int peer = 0; peer < world_size() && status == RankStatus::kOpen; ++peer) {
      if (peer == rank()) continue;
      culprit = peer;
      status = segment_->state(peer).status.load(std::memory_order_acquire);
      const bool died = !core_.is_threads() && polls[peer + 1].revents != 0;
      if (status == RankStatus::kOpen && died) status = RankStatus::failed(Reason::kDied, peer);
    }
  }
  if (poll(polls.data(), 1, static_cast<int>(kGrace.count())) == 0) stop(culprit, status);
}

// ---- shutdown ---------------------------------------------------------------------------------

CudaCommunicator::~CudaCommunicator() { close(false); }

void CudaCommunicator::close(bool abort) {
  if (process_ != process_generation()) {  // A forked child has neither the thread nor CUDA.
    watcher_.release();
    events_.release();
    return;
  }
  if (abort) stop(rank(), RankStatus::failed(Reason::kAborted, rank()));
  const std::lock_guard<std::mutex> hold(mutex_);
  if (closed_) return;
  closed_ = true;
  drain();
  eventfd_write(wake_, 1);
  watcher_->join();
  tear_down();
}

// Waits for this rank's collectives; bounded, since every wait in them is. If a graph has captured
// launches, waits for the whole device, since replays record no event.
void CudaCommunicator::drain() {
  int previous = device_;
  cudaGetDevice(&previous);
  cudaSetDevice(device_);
  if (captured_) {
    cudaDeviceSynchronize();
  } else if (events_->recorded) {
    cudaEventSynchronize(events_->last);
  }
  cudaSetDevice(previous);
  cudaGetLastError();
}

void CudaCommunicator::tear_down() {
  int previous = device_;
  cudaGetDevice(&previous);
  cudaSetDevice(device_);
  symmetric_.mapped.reset();
  const std::weak_ptr<MappedMemory> shared = memory_;
  const std::shared_ptr<DeviceMemory> own = memory_ ? memory_->own : nullptr;
  memory_.reset();
  // Peers usually close at the same time. Memory that they still map after this wait is freed
  // later; see ~DeviceMemory(). Those whose children are open do not unmap it.
  const auto deadline = Clock::now() + kGrace;
  while (own && shared.expired() && own->is_mapped() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  symmetric_.heap.reset();
  events_.reset();
  if (wake_ >= 0) ::close(wake_);
  wake_ = -1;
  cudaSetDevice(previous);
  cudaGetLastError();
}

}  // namespace pipekernels
