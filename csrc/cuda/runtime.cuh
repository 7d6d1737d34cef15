// What everything here wants of the CUDA runtime: errors as exceptions, and a current device.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

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

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace pipekernels
