#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>
#include <vector>

#include "host/runtime.cuh"
#include "owned_memory.cuh"
#include "pipekernels/collectives/cuda_communicator.h"
#include "pipekernels/shared_memory/process.h"

namespace pipekernels {
namespace {

constexpr size_t kLeastPart = 2 << 20;  // A page of device memory.

// Memory that could not be freed because other processes still had it mapped.
struct DeferredFree {
  int device;
  std::byte* base;
  std::shared_ptr<Segment> mappers;
  int rank;
};

std::mutex& deferred_frees_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::vector<DeferredFree>& deferred_frees() {
  // Never destroyed, since CUDA may shut down before static objects are destroyed.
  static auto* const list = new std::vector<DeferredFree>;
  return *list;
}

bool mapped_by_peers(const Segment& segment, int rank) {
  for (int peer = 0; peer < segment.world_size(); ++peer) {
    const pid_t process = segment.state(peer).device_mapper.load(std::memory_order_acquire);
    if (peer == rank || process == 0) continue;
    if (kill(process, 0) == 0 || errno == EPERM) return true;  // EPERM: it runs as another user.
  }
  return false;
}

void free_memory(int device, std::byte* base) {
  int previous = 0;
  if (cudaGetDevice(&previous) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return;
  const LaunchesPaused paused;
  cudaFree(base);
  cudaSetDevice(previous);
  cudaGetLastError();
}

void free_unmapped() {
  const std::lock_guard<std::mutex> lock(deferred_frees_mutex());
  auto& all = deferred_frees();
  const auto try_free = [](const DeferredFree& deferred) {
    if (mapped_by_peers(*deferred.mappers, deferred.rank)) return false;
    free_memory(deferred.device, deferred.base);
    return true;
  };
  all.erase(std::remove_if(all.begin(), all.end(), try_free), all.end());
}

// Held while growths of a heap are mapped by a peer or withdrawn, as they may be of the same
// process.
std::mutex& growths_mutex() {
  static std::mutex mutex;
  return mutex;
}

cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

unsigned long long id_of(void* stream) {
  unsigned long long id;
  check_cuda(cudaStreamGetId(stream_of(stream), &id), "cudaStreamGetId");
  return id;
}

void add(std::vector<void*>& streams, void* stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

}  // namespace

DeviceMemory::DeviceMemory(int device, size_t bytes, std::shared_ptr<Segment> mappers, int rank)
    : device_(device), process_(process_generation()), mappers_(std::move(mappers)), rank_(rank) {
  free_unmapped();
  const LaunchesPaused paused;
  const DeviceGuard guard(device);
  void* base = nullptr;
  const cudaError_t status = cudaMalloc(&base, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw std::runtime_error("no room for " + std::to_string(bytes >> 20) +
                             " MiB of device memory, most of which is for symmetric tensors; set "
                             "PIPEKERNELS_SYMMETRIC_BYTES to less, or free memory first");
  }
  check_cuda(status, "cudaMalloc");
  base_ = static_cast<std::byte*>(base);
}

DeviceMemory::~DeviceMemory() {
  if (process_ != process_generation()) return;  // CUDA does not work in a forked child.
  if (is_mapped()) {
    const std::lock_guard<std::mutex> lock(deferred_frees_mutex());
    deferred_frees().push_back({device_, base_, mappers_, rank_});
  } else {
    free_memory(device_, base_);
  }
}

MappedMemory::MappedMemory(int device_, std::shared_ptr<Segment> segment_, int rank_)
    : device(device_), process(process_generation()), segment(std::move(segment_)), rank(rank_) {}

MappedMemory::~MappedMemory() {
  if (process != process_generation()) return;
  int previous = device;
  cudaGetDevice(&previous);
  cudaSetDevice(device);
  for (void* base : opened) cudaIpcCloseMemHandle(base);
  of_threads.clear();
  segment->state(rank).device_mapper.store(0, std::memory_order_release);
  cudaSetDevice(previous);
  cudaGetLastError();
}

std::byte* MappedMemory::adopt(std::shared_ptr<DeviceMemory> memory) {
  std::byte* const base = memory->base();
  of_threads.push_back(std::move(memory));
  cudaPointerAttributes attributes;
  check_cuda(cudaPointerGetAttributes(&attributes, base), "cudaPointerGetAttributes");
  if (attributes.device == device) return base;
  const cudaError_t status = cudaDeviceEnablePeerAccess(attributes.device, 0);
  if (status == cudaSuccess) return base;
  cudaGetLastError();
  if (status == cudaErrorPeerAccessAlreadyEnabled) return base;
  throw std::runtime_error("GPU " + std::to_string(device) + " cannot access GPU " +
                           std::to_string(attributes.device) + " directly (" +
                           cudaGetErrorString(status) + ")");
}

std::byte* MappedMemory::open(int peer, const cudaIpcMemHandle_t& handle) {
  void* base = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error("the GPU memory of rank " + std::to_string(peer) +
                             " cannot be mapped (" + cudaGetErrorString(status) +
                             "); CUDA IPC needs peer access between the GPUs, and one IPC "
                             "namespace for all ranks");
  }
  opened.push_back(base);
  return static_cast<std::byte*>(base);
}

std::byte* MappedMemory::growth(int peer, int i, bool is_threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::byte*& base = growths_[peer][i];
  if (base != nullptr) return base;
  const std::lock_guard<std::mutex> published(growths_mutex());
  const DeviceGrowth& growth = segment->growth(peer);
  if (growth.count.load(std::memory_order_acquire) <= i) return nullptr;
  try {
    const DeviceGuard guard(device);
    if (is_threads) {
      std::shared_ptr<DeviceMemory>* memory;
      std::memcpy(&memory, growth.handles[i], sizeof(memory));
      base = adopt(*memory);
    } else {
      cudaIpcMemHandle_t handle;
      std::memcpy(&handle, growth.handles[i], sizeof(handle));
      base = open(peer, handle);
    }
  } catch (const std::runtime_error&) {  // Data in it are copied instead.
  }
  return base;
}

bool DeviceMemory::is_mapped() const { return mappers_ && mapped_by_peers(*mappers_, rank_); }

// ---- the heap ---------------------------------------------------------------------------------

std::byte* CudaHeap::Part::base() const { return memory->base() + begin; }

bool CudaHeap::Part::contains(const void* data, size_t bytes) const {
  const std::byte *from = static_cast<const std::byte*>(data), *end = base() + free_list.capacity();
  return from >= base() && from <= end && bytes <= size_t(end - from);
}

size_t CudaHeap::first_bytes(size_t limit) {
  return std::min(limit, std::max(kLeastPart, limit >> kGrowths));
}

CudaHeap::CudaHeap(std::shared_ptr<DeviceMemory> memory, size_t begin, size_t limit, int device,
                   const Communicator& core)
    : limit_(limit),
      device_(device),
      segment_(core.segment()),
      rank_(core.rank()),
      is_threads_(core.is_threads()),
      process_(process_generation()) {
  parts_.reserve(1 + kGrowths);
  parts_.push_back({std::move(memory), begin, FreeList(first_bytes(limit))});
}

CudaHeap::~CudaHeap() {
  if (process_ != process_generation()) return;
  for (const Released& use : released_) cudaEventDestroy(event_of(use.end));
  const std::lock_guard<std::mutex> lock(growths_mutex());
  segment_->growth(rank_).count.store(0, std::memory_order_release);
}

bool CudaHeap::grow(size_t bytes) {
  size_t capacity = 0;
  for (const Part& part : parts_) capacity += part.free_list.capacity();
  const size_t rest = limit_ - capacity;
  if (parts_.size() > kGrowths || bytes > rest) return false;
  const size_t least = std::min(rest, (bytes + kLeastPart - 1) / kLeastPart * kLeastPart);
  std::shared_ptr<DeviceMemory> memory;
  cudaIpcMemHandle_t handle;
  size_t size = std::min(rest, std::max(least, capacity));
  try {
    memory = std::make_shared<DeviceMemory>(device_, size, is_threads_ ? nullptr : segment_, rank_);
    if (!is_threads_) check_cuda(cudaIpcGetMemHandle(&handle, memory->base()), "a handle");
  } catch (const std::runtime_error&) {
    return false;
  }
  parts_.push_back({std::move(memory), 0, FreeList(size)});
  DeviceGrowth& growth = segment_->growth(rank_);
  const int number = growth.count.load(std::memory_order_relaxed);
  const auto* const in_process = &parts_.back().memory;
  static_assert(sizeof(handle) <= sizeof(growth.handles[0]));
  if (is_threads_) {
    std::memcpy(growth.handles[number], &in_process, sizeof(in_process));
  } else {
    std::memcpy(growth.handles[number], &handle, sizeof(handle));
  }
  growth.count.store(number + 1, std::memory_order_release);
  return true;
}

std::byte* CudaHeap::place(size_t bytes) {
  for (Part& part : parts_) {
    if (const auto offset = part.free_list.allocate(bytes)) return part.base() + *offset;
  }
  return nullptr;
}

CudaHeap::Part* CudaHeap::part_of(const void* data, size_t bytes) const {
  const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& candidate) {
    return candidate.contains(data, bytes);
  });
  return part == parts_.end() ? nullptr : &*part;
}

std::byte* CudaHeap::allocate(size_t bytes, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto capture = capture_of(stream)) return allocate_captured(bytes, stream, *capture);
  std::byte* block = nullptr;
  do {
    block = place(bytes);
  } while (block == nullptr && grow(bytes));
  if (block == nullptr) return nullptr;
  const auto id = id_of(stream);
  for (const Released& use : released_) {
    if (use.stream == id) continue;
    const cudaError_t waited = cudaStreamWaitEvent(stream_of(stream), event_of(use.end), 0);
    if (waited != cudaSuccess) free(block);
    check_cuda(waited, "ordering two streams");
  }
  uses_[block] = {bytes, {stream}, false, std::nullopt};
  return block;
}

// Replays use the block at any time, in any stream: the host waits here for what earlier work does
// with released blocks, and only this capture is given the block again, in the stream that orders
// its uses. The heap does not grow, since peers cannot map more for a launch that is captured.
std::byte* CudaHeap::allocate_captured(size_t bytes, void* stream, unsigned long long capture) {
  const auto fits = [&](const auto& idle) {
    const Use& use = idle.second;
    return use.bytes == bytes && use.streams[0] == stream && use.capture == capture;
  };
  const auto idle = std::find_if(idle_.begin(), idle_.end(), fits);
  if (idle != idle_.end()) return uses_.insert(idle_.extract(idle)).position->first;
  if (bytes > limit_ / 2 - captured_bytes_) return nullptr;
  std::byte* const block = place(bytes);
  if (block == nullptr) return nullptr;
  const IndependentOfCaptures guard;
  for (const Released& use : released_) {
    const cudaError_t waited = cudaEventSynchronize(event_of(use.end));
    if (waited != cudaSuccess) free(block);
    check_cuda(waited, "waiting for released symmetric memory");
  }
  captured_bytes_ += bytes;
  uses_[block] = {bytes, {stream}, true, capture};
  return block;
}

void CudaHeap::use(const void* data, void* stream, bool captured) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (part_of(data, 1) == nullptr) return;
  const auto after = uses_.upper_bound(static_cast<const std::byte*>(data));
  if (after == uses_.begin()) return;  // An invalid tensor: its memory has been released.
  Use& use = std::prev(after)->second;
  use.captured = use.captured || captured;
  add(use.streams, stream);
}

void CudaHeap::release(std::byte* block) {
  if (process_ != process_generation()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto use = uses_.find(block);
  const auto& streams = use->second.streams;
  bool captured = use->second.captured;
  for (void* stream : streams) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    const cudaError_t asked = cudaStreamGetCaptureInfo(stream_of(stream), &status, &capture);
    if (asked != cudaSuccess) cudaGetLastError();  // As CUDA has shut down.
    const bool captures = asked == cudaSuccess && status != cudaStreamCaptureStatusNone;
    if (captures && streams.size() == 1 && use->second.capture == capture) {
      idle_.insert(uses_.extract(use));
      return;
    }
    captured = captured || captures || asked != cudaSuccess;
  }
  int previous = 0;  // A null handle is the stream of the current device.
  if (captured || cudaGetDevice(&previous) != cudaSuccess) return;
  cudaSetDevice(device_);
  const bool noted =
      std::all_of(streams.begin(), streams.end(), [&](void* stream) { return note_end(stream); });
  cudaSetDevice(previous);
  if (!noted) {
    cudaGetLastError();  // As CUDA has shut down.
    return;
  }
  uses_.erase(use);
  free(block);
}

bool CudaHeap::note_end(void* stream) {
  unsigned long long id;
  if (cudaStreamGetId(stream_of(stream), &id) != cudaSuccess) return false;
  auto use = std::find_if(released_.begin(), released_.end(),
                          [&](const Released& each) { return each.stream == id; });
  if (use == released_.end()) {
    cudaEvent_t end;
    if (cudaEventCreateWithFlags(&end, cudaEventDisableTiming) != cudaSuccess) return false;
    use = released_.insert(released_.end(), {id, end});
  }
  return cudaEventRecord(event_of(use->end), stream_of(stream)) == cudaSuccess;
}

void CudaHeap::free(std::byte* block) {
  Part& part = *part_of(block, 1);
  part.free_list.release(block - part.base());
}

uint64_t CudaHeap::location_of(const void* data, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Part* const part = part_of(data, bytes);
  if (part == nullptr) return 0;
  const auto number = static_cast<uint64_t>(part - parts_.data());
  return number << kLocationBits |
         static_cast<uint64_t>(static_cast<const std::byte*>(data) - part->memory->base());
}

std::byte* CudaHeap::growth(int i) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return parts_.at(1 + i).base();
}

// ---- the memory of all ranks ------------------------------------------------------------------

bool SymmetricMemory::has_grown(int world_size) const {
  for (int peer = 0; peer < world_size; ++peer) {
    const auto& count = mapped->segment->growth(owners[peer]).count;
    if (count.load(std::memory_order_acquire) > known[peer]) return true;
  }
  return false;
}

void SymmetricMemory::learn(const Communicator& core, DeviceRanks& ranks, uint64_t launch) {
  for (int peer = 0; peer < core.world_size(); ++peer) {
    const auto& count = mapped->segment->growth(owners[peer]).count;
    for (const int end = count.load(std::memory_order_acquire); known[peer] < end; ++known[peer]) {
      const int i = known[peer];
      std::byte* const base =
          peer == rank ? heap->growth(i) : mapped->growth(owners[peer], i, core.is_threads());
      if (base == nullptr) continue;
      ranks.heap[1 + i][peer] = base;
      auto& known_from = core.segment()->growth(rank).known_from[peer][i];
      known_from.store(launch + 1, std::memory_order_release);
    }
  }
}

uint64_t SymmetricMemory::location_of(const Communicator& core, const void* data, size_t bytes,
                                      uint64_t launch) const {
  const uint64_t location = heap->location_of(data, bytes);
  const auto part = static_cast<int>(location >> kLocationBits);
  for (int peer = 0; part > 0 && peer < core.world_size(); ++peer) {
    const auto& known_from = core.segment()->growth(peer).known_from[rank][part - 1];
    const uint64_t from = known_from.load(std::memory_order_acquire);
    if (from == 0 || launch + 1 < from) return 0;
  }
  return location;
}

}  // namespace pipekernels
