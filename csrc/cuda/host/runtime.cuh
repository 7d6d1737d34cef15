// Helpers for the CUDA runtime: exceptions for errors, a guard for the current device, and a lock
// that keeps blocking calls from coming between launches that depend on each other.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace pipekernels {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // Clear the error, so that unrelated code does not find it.
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(status));
}

// Makes `device` this thread's current device during the guard's lifetime.
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

// Held shared by ranks that are threads of this process while they launch kernels that wait for
// each other, from the first rank's launch to the last one's.
inline std::shared_mutex& launch_mutex() {
  static std::shared_mutex mutex;
  return mutex;
}

// Holds launch_mutex() exclusively around calls of the CUDA runtime that may wait until the device
// is idle and block launches of other threads meanwhile. Polls with try_lock() instead of waiting
// for the lock: a waiting writer could block ranks that still have to share it, for which its
// holders wait. Proceeds without the lock after one second, since the holders may be waiting for
// this thread.
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

// While a thread captures a graph, calls that the capture might have to know of are errors, unless
// their thread says that the capture does not depend on them.
class IndependentOfCaptures {
 public:
  IndependentOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~IndependentOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  IndependentOfCaptures(const IndependentOfCaptures&) = delete;
  IndependentOfCaptures& operator=(const IndependentOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

// The number of the capture that `stream` is part of, if any.
inline std::optional<unsigned long long> capture_of(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream_of(stream), &status, &number),
             "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusNone) return std::nullopt;
  return number;
}

inline bool is_capturing(void* stream) { return capture_of(stream).has_value(); }

}  // namespace pipekernels
