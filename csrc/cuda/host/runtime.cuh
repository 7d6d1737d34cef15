// What everything here wants of the CUDA runtime: errors as exceptions, a current device, and
// launches that nothing comes between.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace pipekernels {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // Not to be found by somebody else.
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(status));
}

// Makes a device the current one of this thread.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device) previous_ = -1;
    if (previous_ >= 0) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// Shared by ranks that are threads of this process and launch kernels that wait for each other,
// from the first launch to the last.
inline std::shared_mutex& launch_mutex() {
  static std::shared_mutex mutex;
  return mutex;
}

// Keeps them from it while this thread calls what may wait until the device is idle, and keep other
// threads from launching meanwhile. Never queues for the lock, since those who hold it wait for
// others who are to share it; and goes on without it after a second, lest they wait for this
// thread.
class LaunchesPaused {
 public:
  LaunchesPaused() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!(held_ = launch_mutex().try_lock()) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  ~LaunchesPaused() {
    if (held_) launch_mutex().unlock();
  }
  LaunchesPaused(const LaunchesPaused&) = delete;
  LaunchesPaused& operator=(const LaunchesPaused&) = delete;

 private:
  bool held_;
};

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace pipekernels
