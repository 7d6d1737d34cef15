// NVLink between GPUs, as the driver's management library tells it. Unlike the CUDA runtime it
// knows GPUs that are hidden from this process.

#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <type_traits>

#include "host/nvlink.cuh"
#include "host/runtime.cuh"
#include "pipekernels/host/nvlink.h"

namespace pipekernels {
namespace {

using Handle = void*;

// The functions of libnvidia-ml.so.1, all of which return 0 for success.
struct Library {
  int (*initialize)();
  int (*handle_of)(const char* uuid, Handle* device);
  int (*status_of)(Handle, Handle, int capability, int* status);
  bool works;
};

constexpr int kNvlinkCapability = 2;  // NVML_P2P_CAPS_INDEX_NVLINK; status 0 is "OK".

Library load() {
  Library found{};
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return found;
  const auto look_up = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  found.works = look_up(found.initialize, "nvmlInit_v2") &&
                look_up(found.handle_of, "nvmlDeviceGetHandleByUUID") &&
                look_up(found.status_of, "nvmlDeviceGetP2PStatus") && found.initialize() == 0;
  return found;
}

std::string name_of(const cudaUUID_t& device) {
  std::string name = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(device.bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    name += digits;
  }
  return name;
}

}  // namespace

bool has_nvlink(const cudaUUID_t& a, const cudaUUID_t& b) {
  static const Library library = load();
  Handle one, other;
  int status = -1;
  return library.works && library.handle_of(name_of(a).c_str(), &one) == 0 &&
         library.handle_of(name_of(b).c_str(), &other) == 0 &&
         library.status_of(one, other, kNvlinkCapability, &status) == 0 && status == 0;
}

bool has_nvlink(int a, int b) {
  cudaDeviceProp of_a, of_b;
  check_cuda(cudaGetDeviceProperties(&of_a, a), "cudaGetDeviceProperties");
  check_cuda(cudaGetDeviceProperties(&of_b, b), "cudaGetDeviceProperties");
  return has_nvlink(of_a.uuid, of_b.uuid);
}

}  // namespace pipekernels
