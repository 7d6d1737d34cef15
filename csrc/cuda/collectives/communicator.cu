#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "host/runtime.cuh"
#include "pipekernels/collectives/communicator.h"
#include "pipekernels/collectives/cuda_communicator.h"
#include "pipekernels/shared_memory/process.h"
#include "shared_memory/owned_memory.cuh"

namespace pipekernels {
namespace {

using Clock = std::chrono::steady_clock;

// How long the watcher thread sleeps between checks of the peers, as kPollInterval in
// collectives/communicator.h.
constexpr std::chrono::milliseconds kWatchInterval{20};
// How long the watcher waits before it stops kernels, and tear_down() for peers to unmap memory. A
// rank may leave, having sent its last signals and seen those of a third rank, while the latter
// have not yet reached this rank, so this rank's kernels may still succeed.
constexpr std::chrono::milliseconds kGrace{200};

}  // namespace

// ---- set-up -----------------------------------------------------------------------------------

struct CudaCommunicator::Events {
  cudaEvent_t last = nullptr;  // The end of the last collective that was not captured.
  bool recorded = false;
  ~Events() {
    if (last) cudaEventDestroy(last);
  }
};

void CudaCommunicator::make_events() {
  events_ = std::make_unique<Events>();
  check_cuda(cudaEventCreateWithFlags(&events_->last, cudaEventDisableTiming), "cudaEventCreate");
}

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

SymmetricMemory CudaCommunicator::shared_memory() {
  const auto hold = lock();
  return closed_ ? SymmetricMemory{} : symmetric_;
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
    poll(polls.data(), polls.size(), static_cast<int>(kWatchInterval.count()));
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
