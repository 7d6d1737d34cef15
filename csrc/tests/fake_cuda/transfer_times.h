// Host time and calls of the CUDA runtime per transfer, on the fake runtime: those of a channel,
// and those that channels issued when they drove torch's streams from Python. What Python and torch
// themselves took is not in it, nor is what a driver takes: the figures compare how much is asked
// of the runtime.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "device_blocks.h"

namespace pipekernels {

// What a transfer from device 0 to device 1 asked of the runtime. Events were made for one use.
class ByTorch {
 public:
  ByTorch(cudaStream_t leaving, cudaStream_t arriving, cudaStream_t origin, cudaStream_t user)
      : leaving_(leaving), arriving_(arriving), origin_(origin), user_(user) {}

  void operator()(const std::vector<TensorCopy>& tensors) {
    follow(0, leaving_, origin_);
    if (done_) wait_and_destroy(origin_, done_);  // The last copy's sources.
    if (used_) wait_and_destroy(arriving_, used_);
    used_ = record(1, user_);
    for (const TensorCopy& tensor : tensors) {  // Tensor.copy_ between two GPUs.
      follow(1, leaving_, arriving_);
      const DeviceGuard guard(0);
      CHECK(cudaMemcpyAsync(tensor.target, tensor.source, tensor.bytes(), cudaMemcpyDefault,
                            leaving_) == cudaSuccess);
      follow(0, arriving_, leaving_);
    }
    done_ = record(1, arriving_);
    CHECK(cudaStreamWaitEvent(user_, done_, 0) == cudaSuccess);
  }

 private:
  static cudaEvent_t record(int device, cudaStream_t stream) {
    const DeviceGuard guard(device);
    cudaEvent_t event = nullptr;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    CHECK(cudaEventRecord(event, stream) == cudaSuccess);
    return event;
  }
  static void wait_and_destroy(cudaStream_t stream, cudaEvent_t event) {
    CHECK(cudaStreamWaitEvent(stream, event, 0) == cudaSuccess);
    CHECK(cudaEventDestroy(event) == cudaSuccess);
  }
  // `device`: of `earlier`.
  static void follow(int device, cudaStream_t later, cudaStream_t earlier) {
    wait_and_destroy(later, record(device, earlier));
  }

  const cudaStream_t leaving_, arriving_, origin_, user_;
  cudaEvent_t done_ = nullptr, used_ = nullptr;
};

// The same by a channel, with what device/channel.py asks of it.
class ByChannel {
 public:
  ByChannel(cudaStream_t origin, cudaStream_t user)
      : channel_(0, 1, 96), origin_(origin), user_(user) {}

  void operator()(const std::vector<TensorCopy>& tensors) {
    CHECK(done_.wait(0, origin_));
    CHECK(used_.wait(1, channel_.arriving()));
    CHECK(channel_.mark(used_, {user_}));
    channel_.send(done_, tensors, {}, origin_, 1);
    CHECK(done_.wait(1, user_));
  }

 private:
  P2PChannel channel_;
  const cudaStream_t origin_, user_;
  P2PEvent done_, used_;
};

struct Cost {
  double microseconds;  // median
  long calls;
};

template <class Send>
Cost cost_of(Send& send, const std::vector<TensorCopy>& tensors) {
  std::vector<double> times;
  const long before = fake_cuda::device().calls;
  constexpr int kRounds = 301;
  for (int i = 0; i < kRounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    send(tensors);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    times.push_back(took.count());
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return {times[kRounds / 2], (fake_cuda::device().calls - before + kRounds / 2) / kRounds};
}

// However many tensors there are, a channel calls the runtime as often as for one.
inline void check_calls(cudaStream_t (*stream_on)(int device)) {
  Blocks blocks;
  ByChannel channel(stream_on(0), stream_on(1));
  const auto from = blocks.take(0, nullptr), to = blocks.take(1, nullptr);
  std::vector<TensorCopy> tensors;
  while (tensors.size() < 8) {
    const size_t offset = 64 * tensors.size();
    tensors.push_back({from.get() + offset, to.get() + offset, 4, {9}, {1}, {1}});
  }
  const long eight = cost_of(channel, tensors).calls;
  tensors.resize(1);
  CHECK(cost_of(channel, tensors).calls == eight);
}

// Prints a line for one tensor and for eight.
inline void print_transfer_times(cudaStream_t (*stream_on)(int device)) {
  fake_cuda::device().checks = false;
  std::printf("%8s %24s %24s\n", "tensors", "driven by torch", "by the channel");
  for (const size_t count : {1, 8}) {
    Blocks blocks;
    const cudaStream_t origin = stream_on(0), user = stream_on(1);
    ByChannel channel(origin, user);
    ByTorch torch(stream_on(0), stream_on(1), origin, user);
    std::vector<std::shared_ptr<char>> memory;
    std::vector<TensorCopy> tensors;
    for (size_t i = 0; i < count; ++i) {
      for (const int device : {0, 1}) memory.push_back(blocks.take(device, device ? user : origin));
      tensors.push_back({memory[2 * i].get(), memory[2 * i + 1].get(), 4, {1000}, {1}, {1}});
    }
    Cost costs[2] = {cost_of(torch, tensors), cost_of(channel, tensors)};
    std::printf("%8zu", count);
    for (const Cost& cost : costs)
      std::printf(" %9.1f us, %3ld calls", cost.microseconds, cost.calls);
    std::printf("\n");
  }
}

}  // namespace pipekernels
