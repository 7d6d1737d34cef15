// Memory for tests on the fake CUDA runtime, given out and taken back as torch's allocators do.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "../check.h"
#include "host/runtime.cuh"
#include "pipekernels/p2p_copy/p2p_copy.h"

namespace pipekernels {

// In place of the copy kernel: one launch in a stream of the current device.
inline void copy_micro_batches_cuda(const MicroBatchCopy& request, void* stream) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  fake_cuda::Stream& launched = device.stream(static_cast<cudaStream_t>(stream));
  CHECK(launched.device == fake_cuda::current_device && !launched.is_capturing());
  std::vector<fake_cuda::Range> reads, writes;
  for (size_t t = 0; t < request.wholes.size(); ++t) {
    const WholeTensor& whole = request.wholes[t];
    int64_t last = 0, last_written = 0;
    bool empty = false;
    for (size_t d = 0; d < whole.shape.size(); ++d) {
      last += (whole.shape[d] - 1) * whole.strides[d];
      last_written += (whole.shape[d] - 1) * request.micro_batches[t].strides[d];
      empty = empty || whole.shape[d] == 0;
    }
    if (empty) continue;
    reads.push_back({whole.data, static_cast<size_t>((last + 1) * whole.item_size)});
    writes.push_back(
        {request.micro_batches[t].data, static_cast<size_t>((last_written + 1) * whole.item_size)});
  }
  const void* const target = writes.empty() ? nullptr : writes[0].base;
  const bool faulty = fake_cuda::is_faulty(launched, target);
  fake_cuda::issue(launched, reads, writes, [=] {
    const auto copy = [request] { copy_micro_batches(request, 1); };
    faulty ? fake_cuda::go_wrong(copy, const_cast<void*>(target)) : copy();
  });
}

constexpr size_t kBlock = 4096;

// Blocks of kBlock bytes. One that is given back is the next one that its stream gets, on whose
// order the allocator relies: the fake runtime checks that nothing else uses it any more.
class Blocks {
 public:
  ~Blocks() {
    for (char* memory : device_memory_) CHECK(cudaFree(memory) == cudaSuccess);
    for (char* memory : pinned_) CHECK(cudaFreeHost(memory) == cudaSuccess);
  }

  // A block of `device` for `stream`, or of pinned memory.
  std::shared_ptr<char> take(int device, void* stream) {
    const auto pool = std::make_pair(device, stream);
    std::vector<char*>& free = free_[pool];
    if (free.empty()) free.push_back(allocate(device));
    char* const memory = free.back();
    free.pop_back();
    return {memory, [this, pool](char* used) {
              const DeviceGuard guard(std::max(pool.first, 0));
              const auto stream = static_cast<cudaStream_t>(pool.second);
              fake_cuda::give_back({used, kBlock}, pool.first == kHost
                                                       ? nullptr
                                                       : &fake_cuda::device().stream(stream));
              free_[pool].push_back(used);
            }};
  }

 private:
  char* allocate(int device) {
    void* memory = nullptr;
    if (device == kHost) {
      CHECK(cudaHostAlloc(&memory, kBlock, 0) == cudaSuccess);
      pinned_.push_back(static_cast<char*>(memory));
    } else {
      const DeviceGuard guard(device);
      CHECK(cudaMalloc(&memory, kBlock) == cudaSuccess);
      device_memory_.push_back(static_cast<char*>(memory));
    }
    return static_cast<char*>(memory);
  }

  std::map<std::pair<int, void*>, std::vector<char*>> free_;
  std::vector<char*> device_memory_, pinned_;
};

// A tensor, in the first kBlock bytes of `memory`, whose elements' bytes follow from a seed.
struct Patterned {
  char* memory;
  std::vector<int64_t> shape, strides;
  int64_t item_size;
  unsigned seed;

  fake_cuda::Range range() const { return {memory, kBlock}; }

  void fill() const {
    each([](char& byte, char wanted) { byte = wanted; });
  }
  void check() const {
    each([](const char& byte, char wanted) { CHECK(byte == wanted); });
  }

 private:
  // Calls body(byte, its value) for all bytes of all elements, in row-major order.
  template <class Body>
  void each(const Body& body) const {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    for (int64_t i = 0; i < elements; ++i) {
      int64_t rest = i, offset = 0;
      for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) {
        offset += rest % shape[d] * strides[d];
      }
      for (int64_t b = 0; b < item_size; ++b) {
        const int64_t position = offset * item_size + b;
        CHECK(position < static_cast<int64_t>(kBlock));
        body(memory[position], static_cast<char>((i * item_size + b) * 7 + seed));
      }
    }
  }
};

// As kernels in `stream` of `device` that write and that read the tensor.
inline void fill_in(int device, void* stream, const Patterned& tensor) {
  const DeviceGuard guard(device);
  const std::lock_guard<std::mutex> hold(fake_cuda::device().context);
  fake_cuda::issue(fake_cuda::device().stream(static_cast<cudaStream_t>(stream)), {},
                   {tensor.range()}, [tensor] { tensor.fill(); });
}
inline void check_in(int device, void* stream, const Patterned& tensor) {
  const DeviceGuard guard(device);
  const std::lock_guard<std::mutex> hold(fake_cuda::device().context);
  fake_cuda::issue(fake_cuda::device().stream(static_cast<cudaStream_t>(stream)), {tensor.range()},
                   {}, [tensor] { tensor.check(); });
}

// The same on the CPU.
inline void fill_on_host(const Patterned& tensor) {
  fake_cuda::access_on_host({}, {tensor.range()});
  tensor.fill();
}
inline void check_on_host(const Patterned& tensor) {
  fake_cuda::access_on_host({tensor.range()}, {});
  tensor.check();
}

}  // namespace pipekernels
