// Streams of the fake CUDA runtime.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "clocks.h"

namespace fake_cuda {

using Task = std::function<void()>;

// An event that is set once.
class Mark {
 public:
  void set() {
    const std::lock_guard<std::mutex> hold(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [this] { return is_set_; });
  }
  bool is_set() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return is_set_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

// A thread that runs tasks one after the other.
class Queue {
 public:
  Queue() : worker_([this] { work(); }) {}
  ~Queue() {
    push(nullptr);
    worker_.join();
  }
  void push(Task task) {
    const std::lock_guard<std::mutex> hold(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

 private:
  void work() {
    while (true) {
      Task task;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        changed_.wait(hold, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (!task) return;
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::thread worker_;  // Last, since it uses the other members.
};

// Runs tasks one after the other. A kernel that has started does not block the queue, which other
// streams may share, but blocks later tasks of its own stream. During a capture, launches are
// recorded instead.
class Stream {
 public:
  Stream(std::shared_ptr<Queue> queue, int device) : device(device), queue_(std::move(queue)) {}
  ~Stream() {
    drain();
    if (former_.first) former_.first->push([kernel = former_.second] { finish(*kernel); });
  }

  void push(Task task) {
    queue_->push([kernel = kernel_, task = std::move(task)] {
      finish(*kernel);
      task();
    });
  }
  // As if it were destroyed, and another one made that gets its handle. Its work goes on.
  void make_anew() {
    former_ = {std::move(queue_), std::move(kernel_)};
    id = next_id++;
    queue_ = std::make_shared<Queue>();
    kernel_ = std::make_shared<std::thread>();
  }
  void drain() {
    const auto end = std::make_shared<Mark>();
    push([end] { end->set(); });
    end->wait();
  }

  void begin_capture() {
    static std::atomic<unsigned long long> captures{0};
    capture = captures++;
    capturing_ = true;
  }
  std::vector<Task> end_capture() {
    capturing_ = false;
    return std::move(captured_);
  }
  bool is_capturing() const { return capturing_; }
  void launch(Task kernel) {
    if (capturing_) {
      captured_.push_back(std::move(kernel));
    } else {
      queue_->push([running = kernel_, kernel = std::move(kernel)] {
        finish(*running);
        *running = std::thread(kernel);
      });
    }
  }

  const int device;
  Clock clock;  // Of what has been issued; see clocks.h.
  std::atomic<unsigned long long> id{next_id++};
  std::atomic<unsigned long long> capture{0};  // The number of the last one.

 private:
  static void finish(std::thread& kernel) {
    if (kernel.joinable()) kernel.join();
  }

  static inline std::atomic<unsigned long long> next_id{0};
  std::shared_ptr<Queue> queue_;
  // The last kernel; only accessed in the queue's thread.
  std::shared_ptr<std::thread> kernel_ = std::make_shared<std::thread>();
  std::pair<std::shared_ptr<Queue>, std::shared_ptr<std::thread>> former_;
  std::atomic<bool> capturing_{false};
  std::vector<Task> captured_;
};

}  // namespace fake_cuda
