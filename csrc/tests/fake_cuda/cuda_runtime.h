// A fake of the parts of the CUDA runtime that the host code of csrc/cuda uses, with devices that
// are simulated by CPU threads. copies.h, which this file includes, has the asynchronous copies.
//
// It behaves as badly as the real runtime may. The first launch of a kernel that has not been
// loaded waits until the device is idle, as cudaFree() does, and blocks other threads meanwhile.
// Streams may share a queue, where a waiting stream blocks the others. Every misuse aborts the
// test.
//
// It encodes assumptions about CUDA; only tests on a GPU show whether they are true.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../check.h"
#include "clocks.h"
#include "faults.h"
#include "streams.h"

namespace fake_cuda {

struct Event {
  int device;
  std::shared_ptr<Mark> mark;  // Of the last cudaEventRecord().
  Clock clock;
};

// A kernel; its address takes the place of the kernel function's.
struct Kernel {
  size_t argument_bytes;
  std::function<void(const std::byte*)> body;
  bool loaded = false;
};

struct Allocation {
  size_t bytes;
  int fd;
  int device;
};

constexpr int kDevices = 3;
inline thread_local int current_device = 0;

class Device {
 public:
  Device() {
    for (int d = 0; d < kDevices; ++d) {
      defaults_.push_back(std::make_unique<Stream>(std::make_shared<Queue>(), d));
    }
  }

  std::mutex context;             // Held by every call that changes state.
  size_t room = size_t{1} << 30;  // Free bytes.
  bool refuses_ipc = false;
  std::map<void*, Allocation> memory;
  std::map<void*, size_t> mapped;  // Mappings of memory of other processes.
  std::map<void*, size_t> pinned;
  std::set<Event*> events;
  std::atomic<bool> one_queue{false};  // Whether new streams share one queue.
  Clock host_clock;                    // Of what the process has waited for.
  Accesses accesses;
  bool peers = true;  // Whether devices can access each other's memory.
  std::set<std::pair<int, int>> enabled_peers;
  int driver_version = 13000;
  int copies_until_failure = -1;  // Negative: copies do not fail.
  std::atomic<long> calls{0};     // About events and copies.
  bool checks = true;             // Whether accesses to memory are checked.

  Stream* make_stream() {
    const std::lock_guard<std::mutex> hold(streams_mutex_);
    if (!one_queue || !queue_) queue_ = std::make_shared<Queue>();
    streams_.push_back(std::make_unique<Stream>(queue_, current_device));
    return streams_.back().get();
  }
  // A null handle is the default stream of the current device.
  Stream& stream(Stream* handle) {
    return handle == nullptr ? *defaults_.at(current_device) : *handle;
  }

  std::vector<Stream*> streams() {
    std::vector<Stream*> all;
    for (const auto& stream : defaults_) all.push_back(stream.get());
    const std::lock_guard<std::mutex> hold(streams_mutex_);
    for (const auto& stream : streams_) all.push_back(stream.get());
    return all;
  }
  void wait_until_idle() {
    for (Stream* stream : streams()) stream->drain();
  }

 private:
  std::mutex streams_mutex_;
  std::shared_ptr<Queue> queue_;  // The queue of the newest stream.
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Stream>> defaults_;
};

// The device is created at its first use, which must come after any fork.
inline std::unique_ptr<Device>& device_pointer() {
  static std::unique_ptr<Device> device;
  return device;
}
inline Device& device() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> hold(mutex);
  auto& pointer = device_pointer();
  if (!pointer) pointer = std::make_unique<Device>();
  return *pointer;
}
inline Stream* make_stream() { return device().make_stream(); }

inline int make_memory_file(size_t bytes) {
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return fd;
}
inline void* map_file(int fd, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(base != MAP_FAILED);
  return base;
}

}  // namespace fake_cuda

using cudaStream_t = fake_cuda::Stream*;
using cudaEvent_t = fake_cuda::Event*;

enum cudaError_t {
  cudaSuccess,
  cudaErrorMemoryAllocation,
  cudaErrorMapResources,
  cudaErrorNoKernelImageForDevice,
  cudaErrorInvalidDeviceFunction,
  cudaErrorPeerAccessAlreadyEnabled,
  cudaErrorNotReady,
  cudaErrorUnknown,
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
constexpr unsigned cudaHostAllocMapped = 1, cudaHostAllocPortable = 2;
constexpr unsigned cudaEventDisableTiming = 1, cudaIpcMemLazyEnablePeerAccess = 1;

struct dim3 {
  unsigned x;
  dim3(unsigned size) : x(size) {}
};
struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  cudaUUID_t uuid;
  int multiProcessorCount;
};
struct cudaFuncAttributes {};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
struct cudaIpcMemHandle_t {
  pid_t process;
  int fd;
  size_t bytes;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "as the test wants it"; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = fake_cuda::current_device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  CHECK(device >= 0 && device < fake_cuda::kDevices);
  fake_cuda::current_device = device;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = cudaDeviceProp{{"the only one"}, 4};
  properties->uuid.bytes[15] = fake_cuda::own_gpu;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  auto& device = fake_cuda::device();
  device.wait_until_idle();
  const std::lock_guard<std::mutex> hold(device.context);
  for (const fake_cuda::Stream* stream : device.streams()) {
    fake_cuda::follow(device.host_clock, stream->clock);
  }
  return cudaSuccess;
}
inline cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = fake_cuda::device().peers;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  CHECK(device.peers);
  const bool is_new = device.enabled_peers.insert({fake_cuda::current_device, peer}).second;
  return is_new ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
}

inline cudaError_t cudaMalloc(void** base, size_t bytes) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  if (bytes > device.room) return cudaErrorMemoryAllocation;
  device.room -= bytes;
  const int fd = fake_cuda::make_memory_file(bytes);
  *base = fake_cuda::map_file(fd, bytes);
  device.memory[*base] = {bytes, fd, fake_cuda::current_device};
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* base) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  device.wait_until_idle();
  const auto found = device.memory.find(base);
  CHECK(found != device.memory.end());
  device.accesses.forget({base, found->second.bytes});
  device.room += found->second.bytes;
  munmap(base, found->second.bytes);
  close(found->second.fd);
  device.memory.erase(found);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* base, int value, size_t bytes) {
  std::memset(base, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** base, size_t bytes, unsigned) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  *base = std::aligned_alloc(128, (bytes + 127) / 128 * 128);
  device.pinned[*base] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaHostGetDevicePointer(void** seen, void* base, unsigned) {
  *seen = base;
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* base) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  device.wait_until_idle();
  const auto found = device.pinned.find(base);
  CHECK(found != device.pinned.end());
  device.accesses.forget({base, found->second});
  device.pinned.erase(found);
  std::free(base);
  return cudaSuccess;
}

inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* base) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  const auto found = device.memory.find(base);
  CHECK(found != device.memory.end());
  *handle = {getpid(), found->second.fd, found->second.bytes};
  return cudaSuccess;
}
inline cudaError_t cudaIpcOpenMemHandle(void** base, cudaIpcMemHandle_t handle, unsigned) {
  CHECK(handle.process != getpid());
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  const std::string file =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(file.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 || device.refuses_ipc) return cudaErrorMapResources;
  *base = fake_cuda::map_file(fd, handle.bytes);
  close(fd);
  device.mapped[*base] = handle.bytes;
  return cudaSuccess;
}
inline cudaError_t cudaIpcCloseMemHandle(void* base) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  const auto found = device.mapped.find(base);
  CHECK(found != device.mapped.end());
  munmap(base, found->second);
  device.mapped.erase(found);
  return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* function) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  auto* kernel = static_cast<fake_cuda::Kernel*>(const_cast<void*>(function));
  if (!kernel->loaded) device.wait_until_idle();
  kernel->loaded = true;
  return cudaSuccess;
}
inline cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                    cudaStream_t stream) {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, function);
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  const auto* kernel = static_cast<const fake_cuda::Kernel*>(function);
  if (!kernel->body) return cudaErrorInvalidDeviceFunction;
  const auto* first = static_cast<const std::byte*>(arguments[0]);
  device.stream(stream).launch(
      [kernel, argument = std::vector<std::byte>(first, first + kernel->argument_bytes)] {
        kernel->body(argument.data());
      });
  return cudaSuccess;
}

inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                            unsigned long long* number) {
  const auto& stream = fake_cuda::device().stream(handle);
  *status = stream.is_capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *number = stream.capture;
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = fake_cuda::device().stream(stream).id;
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  ++device.calls;
  CHECK(device.events.count(event) == 1 && !device.stream(stream).is_capturing());
  if (const auto mark = event->mark) device.stream(stream).push([mark] { mark->wait(); });
  fake_cuda::follow(device.stream(stream).clock, event->clock);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  ++device.calls;
  *event = new fake_cuda::Event{fake_cuda::current_device, nullptr, {}};
  device.events.insert(*event);
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  ++device.calls;
  CHECK(device.events.erase(event) == 1);
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  ++device.calls;
  auto& recorded = device.stream(stream);
  CHECK(device.events.count(event) == 1 && !recorded.is_capturing());
  CHECK(event->device == recorded.device);
  event->mark = std::make_shared<fake_cuda::Mark>();
  fake_cuda::follow(recorded.clock, device.host_clock);
  event->clock = recorded.clock;
  recorded.push([mark = event->mark] { mark->set(); });
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::shared_ptr<fake_cuda::Mark> mark;
  {
    auto& device = fake_cuda::device();
    const std::lock_guard<std::mutex> hold(device.context);
    CHECK(device.events.count(event) == 1);
    mark = event->mark;
    fake_cuda::follow(device.host_clock, event->clock);
  }
  if (mark) mark->wait();
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  CHECK(device.events.count(event) == 1);
  if (event->mark && !event->mark->is_set()) return cudaErrorNotReady;
  fake_cuda::follow(device.host_clock, event->clock);
  return cudaSuccess;
}

#include "copies.h"
