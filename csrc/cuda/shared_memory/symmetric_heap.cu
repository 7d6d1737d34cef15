#include <signal.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <vector>

#include "host/runtime.cuh"
#include "owned_memory.cuh"
#include "pipekernels/collectives/cuda_communicator.h"
#include "pipekernels/shared_memory/process.h"

namespace pipekernels {
namespace {

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
    if (peer != rank && process != 0 && kill(process, 0) == 0) return true;
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

void MappedMemory::adopt(int peer, std::shared_ptr<DeviceMemory> memory) {
  bases[peer] = memory->base();
  of_threads.push_back(std::move(memory));
  cudaPointerAttributes attributes;
  check_cuda(cudaPointerGetAttributes(&attributes, bases[peer]), "cudaPointerGetAttributes");
  if (attributes.device == device) return;
  const cudaError_t status = cudaDeviceEnablePeerAccess(attributes.device, 0);
  if (status == cudaSuccess) return;
  cudaGetLastError();
  if (status == cudaErrorPeerAccessAlreadyEnabled) return;
  throw std::runtime_error("GPU " + std::to_string(device) + " cannot access GPU " +
                           std::to_string(attributes.device) + " directly (" +
                           cudaGetErrorString(status) + ")");
}

void MappedMemory::open(int peer, const cudaIpcMemHandle_t& handle) {
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
  bases[peer] = static_cast<std::byte*>(base);
}

bool DeviceMemory::is_mapped() const { return mappers_ && mapped_by_peers(*mappers_, rank_); }

CudaHeap::CudaHeap(std::shared_ptr<DeviceMemory> memory, size_t begin, size_t capacity)
    : memory_(std::move(memory)),
      base_(memory_->base() + begin),
      begin_(begin),
      process_(process_generation()),
      free_list_(capacity) {}

std::byte* CudaHeap::allocate(size_t bytes, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (void* other : streams_) {
    if (other == stream || !is_capturing(other)) continue;
    throw std::runtime_error(
        "a CUDA graph is being captured in a stream that has used released symmetric memory, so "
        "another stream cannot wait for that use; allocate symmetric tensors before the capture");
  }
  const auto offset = free_list_.allocate(bytes);
  if (!offset) return nullptr;
  for (void* other : streams_) {
    if (other == stream) continue;
    cudaEvent_t event;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    const cudaError_t recorded = cudaEventRecord(event, stream_of(other));
    const cudaError_t waited =
        recorded == cudaSuccess ? cudaStreamWaitEvent(stream_of(stream), event, 0) : recorded;
    cudaEventDestroy(event);  // Takes effect when the event has completed.
    if (waited != cudaSuccess) free_list_.release(*offset);
    check_cuda(waited, "ordering two streams");
  }
  streams_.assign(streams_.empty() ? 0 : 1, stream);
  uses_[*offset] = {{stream}, false};
  return base_ + *offset;
}

void CudaHeap::use(const void* data, void* stream, bool captured) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (data < base_ || data >= base_ + free_list_.capacity()) return;
  const auto after = uses_.upper_bound(static_cast<const std::byte*>(data) - base_);
  if (after == uses_.begin()) return;  // An invalid tensor: its memory has been released.
  Use& use = std::prev(after)->second;
  use.captured = use.captured || captured;
  add(use.streams, stream);
}

void CudaHeap::release(std::byte* block) {
  if (process_ != process_generation()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto use = uses_.find(block - base_);
  bool captured = use->second.captured;
  for (void* stream : use->second.streams) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t asked = cudaStreamIsCapturing(stream_of(stream), &status);
    if (asked != cudaSuccess) cudaGetLastError();  // As CUDA has shut down.
    captured = captured || asked != cudaSuccess || status != cudaStreamCaptureStatusNone;
  }
  if (captured) return;
  for (void* stream : use->second.streams) add(streams_, stream);
  uses_.erase(use);
  free_list_.release(block - base_);
}

uint64_t CudaHeap::location_of(const void* data, size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const size_t all = free_list_.capacity();
  if (begin < base_ || begin > base_ + all || bytes > size_t(base_ + all - begin)) return 0;
  return begin_ + (begin - base_);
}

}  // namespace pipekernels
