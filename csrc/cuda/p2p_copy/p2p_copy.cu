#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/runtime.cuh"
#include "p2p_copy/events.cuh"
#include "pipekernels/p2p_copy/p2p_copy.h"

namespace pipekernels {
namespace {

// Slots are aligned for the widest accesses of the copy kernel, and so is what lies in them.
constexpr size_t kAlignment = 16;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

cudaStream_t new_stream(int device) {
  if (device == kHost) return nullptr;
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

// Whether kernels and copies of `device` can use the memory of `peer`, which is then enabled.
bool enable_access(int device, int peer) {
  int possible = 0;
  check_cuda(cudaDeviceCanAccessPeer(&possible, device, peer), "cudaDeviceCanAccessPeer");
  if (!possible) return false;
  const DeviceGuard guard(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // Clear it.
  } else {
    check_cuda(status, "cudaDeviceEnablePeerAccess");
  }
  return true;
}

constexpr size_t kPageBytes = 4096;
constexpr size_t kPageWords = kPageBytes / sizeof(uint64_t);

// Device memory of `pages` pages.
std::shared_ptr<uint64_t> allocate_pages(int device, size_t pages) {
  const DeviceGuard guard(device);
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, pages * kPageBytes), "cudaMalloc");
  return {static_cast<uint64_t*>(memory), [](uint64_t* used) { cudaFree(used); }};
}

// Whether a page that is copied from `device` to `peer` and back, and words that the copy kernel
// writes to `peer`, arrive as they were. Behind an IOMMU, PCI access control or a patched driver
// they may get lost or change, although the driver has enabled the access. The streams are those of
// the channel.
bool arrives(int device, int peer, cudaStream_t leaving, cudaStream_t arriving) {
  const auto here = allocate_pages(device, 2), there = allocate_pages(peer, 2);
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, 4 * kPageBytes, cudaHostAllocPortable), "cudaHostAlloc");
  const std::unique_ptr<void, decltype(&cudaFreeHost)> pinned(memory, &cudaFreeHost);
  auto* const sent = static_cast<uint64_t*>(memory);
  uint64_t* const back = sent + kPageWords;   // The page as `device` reads it at `peer`.
  uint64_t* const page = back + kPageWords;   // As `peer` has it.
  uint64_t* const words = page + kPageWords;  // Those at even places.
  std::fill(back, sent + 4 * kPageWords, 0);
  for (size_t i = 0; i < kPageWords; ++i) sent[i] = (i + 1) * 0x9e3779b97f4a7c15u;

  const auto copy = [](void* target, const void* source, size_t pages, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(target, source, pages * kPageBytes, cudaMemcpyDefault, stream),
               "cudaMemcpyAsync");
  };
  copy(there.get(), back, 2, arriving);
  check_cuda(cudaStreamSynchronize(arriving), "cudaStreamSynchronize");
  {
    const DeviceGuard guard(device);
    copy(here.get(), sent, 1, leaving);
    copy(there.get(), here.get(), 1, leaving);
    TensorCopy even{};
    even.source = reinterpret_cast<char*>(here.get());
    even.target = reinterpret_cast<char*>(there.get() + kPageWords);
    even.item_size = sizeof(uint64_t);
    even.shape = {kPageWords / 2};
    even.source_strides = {2};
    even.target_strides = {1};
    copy_micro_batches_cuda(as_micro_batches({even}), leaving);
    copy(here.get() + kPageWords, there.get(), 1, leaving);
    copy(back, here.get() + kPageWords, 1, leaving);
    check_cuda(cudaStreamSynchronize(leaving), "cudaStreamSynchronize");
  }
  copy(page, there.get(), 2, arriving);
  check_cuda(cudaStreamSynchronize(arriving), "cudaStreamSynchronize");
  bool same = std::equal(sent, back, back) && std::equal(sent, back, page);
  for (size_t i = 0; i < kPageWords; i += 2) same = same && words[i / 2] == sent[i];
  return same;
}

// cudaMemcpyBatchAsync() is in toolkits from CUDA 12.8, and so are drivers that know it.
constexpr int kBatchesSince = 12080;

bool driver_has_batches() {
  if (CUDART_VERSION < kBatchesSince) return false;
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  return version >= kBatchesSince;
}

// Runs of one call may be copied in any order. `stream` must not be a default stream.
void copy_in_batch(const std::vector<Run>& runs, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  std::vector<void*> targets, sources;
  std::vector<size_t> sizes;
  for (const Run& run : runs) {
    targets.push_back(run.target);
    sources.push_back(const_cast<char*>(run.source));
    sizes.push_back(run.bytes);
  }
  cudaMemcpyAttributes in_order{};
  in_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t status = cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(),
                                                  runs.size(), &in_order, &first, 1, stream);
#else
  size_t failed = 0;
  const cudaError_t status =
      cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), runs.size(), &in_order,
                           &first, 1, &failed, stream);
#endif
  check_cuda(status, "cudaMemcpyBatchAsync");
#else
  static_cast<void>(runs);
  static_cast<void>(stream);
#endif
}

bool is_pinned(const void* memory) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeHost;
}

}  // namespace

bool P2PEvent::wait(int device, void* stream) const {
  const DeviceGuard guard(device);
  if (is_capturing(stream)) return false;
  for (const auto& event : events_) wait_for(stream_of(stream), event);
  return true;
}

void P2PEvent::synchronize() const {
  for (const auto& event : events_) {
    check_cuda(cudaEventSynchronize(EventPool::event_of(event)), "cudaEventSynchronize");
  }
}

bool P2PEvent::is_done() const {
  const IndependentOfCaptures guard;
  for (const auto& event : events_) {
    const cudaError_t status = cudaEventQuery(EventPool::event_of(event));
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // Clear it.
      return false;
    }
    check_cuda(status, "cudaEventQuery");
  }
  return true;
}

class P2PChannel::State {
 public:
  State(int source, int target, size_t slot_bytes)
      : source_(source), target_(target), slot_bytes_(slot_bytes) {
    if (std::max(source, target) < 0 || source == target || slot_bytes < kAlignment ||
        slot_bytes % kAlignment != 0) {
      throw std::invalid_argument(
          "a channel needs two devices, one of them a CUDA device, and slots of a multiple of " +
          std::to_string(kAlignment) + " bytes, got " + std::to_string(source) + ", " +
          std::to_string(target) + " and " + std::to_string(slot_bytes));
    }
    const LaunchesPaused paused;
    const IndependentOfCaptures guard;
    batches_ = driver_has_batches();
    leaving_ = new_stream(source);
    arriving_ = new_stream(target);
    if (source != kHost && target != kHost && enable_access(source, target)) {
      peer_access_ = arrives(source, target, leaving_, arriving_);
      broken_link_ = !peer_access_;
    }
    if (source != kHost) of_source_ = std::make_shared<EventPool>(source);
    if (target != kHost) of_target_ = std::make_shared<EventPool>(target);
  }

  ~State() {
    const LaunchesPaused paused;
    const IndependentOfCaptures guard;
    drain();
    for (const Slot& slot : slots_) {
      if (slot.memory != nullptr) cudaFreeHost(slot.memory);
    }
  }

  int source() const { return source_; }
  int target() const { return target_; }
  cudaStream_t leaving() const { return leaving_; }
  cudaStream_t arriving() const { return arriving_; }
  bool has_peer_access() const { return peer_access_; }
  bool has_broken_link() const { return broken_link_; }
  EventPool& of_target() const { return *of_target_; }

  // Returns the event after the copies, and whether CPU memory is still read.
  std::pair<std::shared_ptr<void>, bool> send(const std::vector<TensorCopy>& tensors,
                                              const std::vector<char*>& snapshots,
                                              cudaStream_t stream, int threads) {
    if (!snapshots.empty() && (snapshots.size() != tensors.size() || source_ == kHost)) {
      throw std::invalid_argument(
          "there must be a snapshot on the source's device for each tensor");
    }
    const DeviceGuard guard(source_ == kHost ? target_ : source_);
    if (source_ != kHost && is_capturing(stream)) {
      throw std::runtime_error(
          "copies between devices cannot be part of a CUDA graph, and the current stream of cuda:" +
          std::to_string(source_) + " is being captured; copy before the capture or after it");
    }
    const Transfer plan = snapshots.empty() ? plan_transfer(tensors) : Transfer{};
    const std::lock_guard<std::mutex> turn(mutex_);
    try {
      if (source_ == kHost) return send_from_host(plan, threads);
      if (snapshots.empty()) return send_from_device(plan, stream);
      return send_from_device(take_snapshots(tensors, snapshots, stream), stream);
    } catch (...) {
      drain();
      throw;
    }
  }

 private:
  // Pinned memory that pieces of copies pass through.
  struct Slot {
    char* memory = nullptr;
    std::shared_ptr<void> free;  // The event after the last copy out of it; null if there was none.
  };

  void drain() const {
    if (source_ != kHost) cudaStreamSynchronize(leaving_);
    if (target_ != kHost) cudaStreamSynchronize(arriving_);
  }

  // Copies the tensors in the caller's stream. Returns the copies of the snapshots.
  static Transfer take_snapshots(const std::vector<TensorCopy>& tensors,
                                 const std::vector<char*>& snapshots, cudaStream_t stream) {
    std::vector<TensorCopy> first = tensors, second = tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      first[i].target = snapshots[i];
      second[i].source = snapshots[i];
      second[i].source_strides = tensors[i].target_strides;
    }
    Transfer plan = plan_transfer(second);
    copy_micro_batches_cuda(as_micro_batches(first), stream);
    return plan;
  }

  std::pair<std::shared_ptr<void>, bool> send_from_host(const Transfer& plan, int threads) {
    Transfer direct, through_slots;
    for (const Run& run : plan.runs) {
      (is_pinned(run.source) ? direct : through_slots).runs.push_back(run);
    }
    through_slots.strided = plan.strided;
    copy_runs(direct.runs, arriving_);
    copy_through_slots(through_slots, threads);
    return {of_target_->record(arriving_), !direct.runs.empty()};
  }

  std::pair<std::shared_ptr<void>, bool> send_from_device(const Transfer& plan,
                                                          cudaStream_t stream) {
    wait_for(leaving_, of_source_->record(stream));
    if (target_ != kHost && !peer_access_) {
      copy_through_slots(plan, 1);
      return {of_target_->record(arriving_), false};
    }
    if (target_ != kHost)
      wait_for(leaving_, of_target_->record(arriving_));  // Memory is free then.
    copy(plan, leaving_);
    auto done = of_source_->record(leaving_);
    if (target_ != kHost) wait_for(arriving_, done);
    return {std::move(done), false};
  }

  // In a stream of the current device.
  void copy(const Transfer& plan, cudaStream_t stream) const {
    copy_runs(plan.runs, stream);
    if (!plan.strided.empty()) copy_micro_batches_cuda(as_micro_batches(plan.strided), stream);
  }

  void copy_runs(const std::vector<Run>& runs, cudaStream_t stream) const {
    if (batches_ && runs.size() > 1) {
      copy_in_batch(runs, stream);
      return;
    }
    for (const Run& run : runs) {
      check_cuda(cudaMemcpyAsync(run.target, run.source, run.bytes, cudaMemcpyDefault, stream),
                 "cudaMemcpyAsync");
    }
  }

  // Slots take turns; each is filled with as much as there is room for.
  void copy_through_slots(const Transfer& plan, int threads) {
    Transfer in;           // Into the current slot.
    std::vector<Run> out;  // Out of it.
    size_t used = 0;
    const auto flush = [&] {
      if (out.empty()) return;
      pass(in, out, threads);
      in = {};
      out.clear();
      used = 0;
    };
    for (const Run& run : plan.runs) {
      for (size_t begin = 0; begin < run.bytes;) {
        if (used == slot_bytes_) flush();
        char* const place = next_slot().memory + used;
        const size_t bytes = std::min(run.bytes - begin, slot_bytes_ - used);
        in.runs.push_back({run.source + begin, place, bytes});
        out.push_back({place, run.target + begin, bytes});
        used += aligned(bytes);
        begin += bytes;
      }
    }
    for (const TensorCopy& tensor : plan.strided) {
      for (TensorCopy& piece : pieces_of(tensor, slot_bytes_)) {
        const size_t bytes = piece.bytes();
        if (used + bytes > slot_bytes_) flush();
        char* const place = next_slot().memory + used;
        out.push_back({place, piece.target, bytes});
        piece.target = place;
        in.strided.push_back(std::move(piece));
        used += aligned(bytes);
      }
    }
    flush();
  }

  // Copies through the next slot.
  void pass(const Transfer& in, const std::vector<Run>& out, int threads) {
    Slot& slot = next_slot();
    turn_ = 1 - turn_;
    if (source_ == kHost) {
      if (slot.free) {
        check_cuda(cudaEventSynchronize(EventPool::event_of(slot.free)), "cudaEventSynchronize");
      }
      copy_on_cpu(in, threads);
    } else {
      if (slot.free) wait_for(leaving_, slot.free);
      copy(in, leaving_);
      wait_for(arriving_, of_source_->record(leaving_));
    }
    copy_runs(out, arriving_);
    slot.free = of_target_->record(arriving_);
  }

  Slot& next_slot() {
    for (Slot& slot : slots_) {
      if (slot.memory != nullptr) continue;
      const LaunchesPaused paused;
      const IndependentOfCaptures guard;
      void* memory = nullptr;
      const unsigned flags = cudaHostAllocPortable | cudaHostAllocMapped;
      check_cuda(cudaHostAlloc(&memory, slot_bytes_, flags), "cudaHostAlloc");
      slot.memory = static_cast<char*>(memory);
    }
    return slots_[turn_];
  }

  const int source_, target_;
  const size_t slot_bytes_;
  bool batches_ = false, peer_access_ = false, broken_link_ = false;
  cudaStream_t leaving_ = nullptr, arriving_ = nullptr;
  std::shared_ptr<EventPool> of_source_, of_target_;  // Null for the CPU.
  std::mutex mutex_;                                  // Held by send().
  Slot slots_[2];
  int turn_ = 0;  // The slot that is filled next.
};

P2PChannel::P2PChannel(int source, int target, size_t slot_bytes)
    : state_(std::make_unique<State>(source, target, slot_bytes)) {}
P2PChannel::~P2PChannel() = default;

int P2PChannel::source() const { return state_->source(); }
int P2PChannel::target() const { return state_->target(); }
void* P2PChannel::leaving() const { return state_->leaving(); }
void* P2PChannel::arriving() const { return state_->arriving(); }
bool P2PChannel::has_peer_access() const { return state_->has_peer_access(); }
bool P2PChannel::has_broken_link() const { return state_->has_broken_link(); }

bool P2PChannel::send(P2PEvent& event, const std::vector<TensorCopy>& tensors,
                      const std::vector<char*>& snapshots, void* stream, int threads) {
  auto [done, still_reads] = state_->send(tensors, snapshots, stream_of(stream), threads);
  event.events_ = {std::move(done)};
  return still_reads;
}

bool P2PChannel::mark(P2PEvent& event, const std::vector<void*>& streams) {
  const DeviceGuard guard(state_->target());
  for (void* stream : streams) {
    if (is_capturing(stream)) return false;
  }
  std::vector<std::shared_ptr<void>> events;
  for (void* stream : streams) events.push_back(state_->of_target().record(stream_of(stream)));
  event.events_ = std::move(events);
  return true;
}

}  // namespace pipekernels
