// Streams of the program's own and asynchronous copies of the fake CUDA runtime, which check that
// every access waits for those that it must come after. Only cuda_runtime.h includes this.
#pragma once

#include <random>
#include <utility>

#include "pipekernels/host/fuzz.h"

#define CUDART_VERSION 13000

namespace fake_cuda {

// The place of memory in the ranges of `map`, by their first bytes; its end if it is in none.
template <class Map, class Bytes>
auto containing(Map& map, const void* place, const Bytes& bytes_of) {
  auto found = map.upper_bound(const_cast<void*>(place));
  if (found == map.begin()) return map.end();
  --found;
  const auto offset = static_cast<const char*>(place) - static_cast<char*>(found->first);
  return static_cast<size_t>(offset) < bytes_of(found->second) ? found : map.end();
}

// The rest needs Device::context.

inline cudaPointerAttributes attributes_of(const void* place) {
  auto& device = fake_cuda::device();
  const auto on_device =
      containing(device.memory, place, [](const Allocation& found) { return found.bytes; });
  if (on_device != device.memory.end()) return {cudaMemoryTypeDevice, on_device->second.device};
  const auto pinned = containing(device.pinned, place, [](size_t bytes) { return bytes; });
  return {pinned != device.pinned.end() ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered, 0};
}

// Issues work in a stream that reads and writes memory of its device, of peers, or pinned.
inline void issue(Stream& stream, const std::vector<Range>& reads, const std::vector<Range>& writes,
                  Task task) {
  auto& device = fake_cuda::device();
  const auto with_delay = [task = std::move(task)] {
    pipekernels::fuzz_delay();
    task();
  };
  if (!device.checks) return stream.push(with_delay);
  for (const auto* ranges : {&reads, &writes}) {
    for (const Range& range : *ranges) {
      const auto found = attributes_of(range.base);
      CHECK(found.type != cudaMemoryTypeUnregistered);
      CHECK(found.type == cudaMemoryTypeHost || found.device == stream.device ||
            device.enabled_peers.count({stream.device, found.device}) == 1);
    }
  }
  follow(stream.clock, device.host_clock);
  device.accesses.add(&stream, stream.clock, device.host_clock, reads, writes);
  stream.push(with_delay);
}

// The same for the calling thread.
inline void access_on_host(const std::vector<Range>& reads, const std::vector<Range>& writes) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  device.accesses.add(&device.host_clock, device.host_clock, device.host_clock, reads, writes);
}

// An allocator gives memory of `stream` out again, which must not be in use then. `stream` is null
// for memory of the host.
inline void give_back(const Range& range, Stream* stream) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  if (stream == nullptr) {
    device.accesses.add(&device.host_clock, device.host_clock, device.host_clock, {}, {range});
  } else {
    follow(stream->clock, device.host_clock);
    device.accesses.add(stream, stream->clock, device.host_clock, {}, {range});
  }
}

// Whether writes of `stream` to `target` go over the faulty link.
inline bool is_faulty(const Stream& stream, const void* target) {
  const auto found = attributes_of(target);
  return fault.kind != Fault::kNone && found.type == cudaMemoryTypeDevice &&
         stream.device == fault.from && found.device == fault.to;
}

}  // namespace fake_cuda

enum cudaMemcpyKind { cudaMemcpyDefault };
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderAny, cudaMemcpySrcAccessOrderStream };
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
};
constexpr unsigned cudaStreamNonBlocking = 1;
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = fake_cuda::device().driver_version;
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* place) {
  const std::lock_guard<std::mutex> hold(fake_cuda::device().context);
  *attributes = fake_cuda::attributes_of(place);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  CHECK(flags == cudaStreamNonBlocking);
  *stream = fake_cuda::make_stream();
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  auto& device = fake_cuda::device();
  CHECK(!device.stream(stream).is_capturing());
  device.stream(stream).drain();
  const std::lock_guard<std::mutex> hold(device.context);
  fake_cuda::follow(device.host_clock, device.stream(stream).clock);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  auto& device = fake_cuda::device();
  const std::lock_guard<std::mutex> hold(device.context);
  CHECK(!device.stream(stream).is_capturing());
  ++device.calls;
  if (device.copies_until_failure == 0) return cudaErrorUnknown;
  if (device.copies_until_failure > 0) --device.copies_until_failure;
  const bool faulty = fake_cuda::is_faulty(device.stream(stream), target);
  fake_cuda::issue(device.stream(stream), {{source, bytes}}, {{target, bytes}}, [=] {
    const auto copy = [=] { std::memcpy(target, source, bytes); };
    faulty ? fake_cuda::go_wrong(copy, target) : copy();
  });
  return cudaSuccess;
}
// The copies of a batch run in any order.
inline cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources,
                                        const size_t* sizes, size_t count,
                                        cudaMemcpyAttributes* attributes, size_t* first,
                                        size_t attribute_count, cudaStream_t stream) {
  auto& device = fake_cuda::device();
  CHECK(device.driver_version >= 12080 && stream != nullptr && count > 0);
  CHECK(attribute_count == 1 && *first == 0);
  CHECK(attributes->srcAccessOrder == cudaMemcpySrcAccessOrderStream);
  const std::lock_guard<std::mutex> hold(device.context);
  ++device.calls;
  if (device.copies_until_failure == 0) return cudaErrorUnknown;
  if (device.copies_until_failure > 0) --device.copies_until_failure;
  struct One {
    void* target;
    const void* source;
    size_t bytes;
  };
  std::vector<One> copies;
  std::vector<fake_cuda::Range> reads, writes;
  for (size_t i = 0; i < count; ++i) {
    copies.push_back({targets[i], sources[i], sizes[i]});
    reads.push_back({sources[i], sizes[i]});
    writes.push_back({targets[i], sizes[i]});
  }
  static std::minstd_rand random;  // Under the lock.
  std::shuffle(copies.begin(), copies.end(), random);
  fake_cuda::issue(device.stream(stream), reads, writes, [copies] {
    for (const One& copy : copies) {
      std::memcpy(copy.target, copy.source, copy.bytes);
      pipekernels::fuzz_delay();
    }
  });
  return cudaSuccess;
}
