// Events that are used again and again, as making one takes as long as several launches.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "host/runtime.cuh"

namespace pipekernels {

// Events of one device. An event may be recorded again as soon as nobody will wait for its last
// record any more: waits that were issued stay with the record that they found.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(int device) : device_(device) {}
  ~EventPool() {
    for (const cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event after the work issued so far in `stream`, which is not being captured. It is one of
  // the pool's device, which must be the current one if it is a default stream. The event comes
  // back when the last owner lets go of it.
  std::shared_ptr<void> record(cudaStream_t stream) {
    std::shared_ptr<void> event(take(),
                                [pool = shared_from_this()](void* used) { pool->put(used); });
    check_cuda(cudaEventRecord(event_of(event), stream), "cudaEventRecord");
    return event;
  }

  static cudaEvent_t event_of(const std::shared_ptr<void>& event) {
    return static_cast<cudaEvent_t>(event.get());
  }

 private:
  cudaEvent_t take() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    const DeviceGuard guard(device_);
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  }
  void put(void* event) {
    const std::lock_guard<std::mutex> hold(mutex_);
    free_.push_back(static_cast<cudaEvent_t>(event));
  }

  const int device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

inline void wait_for(cudaStream_t stream, const std::shared_ptr<void>& event) {
  check_cuda(cudaStreamWaitEvent(stream, EventPool::event_of(event), 0), "cudaStreamWaitEvent");
}

}  // namespace pipekernels
