#include "pipekernels/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace pipekernels {
namespace {

using Body = std::function<void(int64_t)>;

// Workers take no signals: those belong to the interpreter's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  sigset_t saved_;
};

class Pool {
 public:
  // Returns false, without having run anything, while another thread uses the pool.
  bool run(int64_t pieces, int threads, const Body& body) {
    std::unique_lock<std::mutex> caller(caller_, std::try_to_lock);
    if (!caller) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start_workers(threads - 1);
      body_ = &body;
      pieces_ = pieces;
      next_.store(0, std::memory_order_relaxed);
      seats_ = threads - 1;
    }
    wake_.notify_all();
    take_pieces();
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // a worker that wakes from now on goes back to sleep
    done_.wait(lock, [this] { return active_ == 0; });
    return true;
  }

 private:
  void start_workers(int wanted) {
    SignalsBlocked blocked;
    try {
      for (; workers_ < wanted; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: those that run share the pieces.
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return seats_ > 0; });
      --seats_;
      ++active_;
      lock.unlock();
      take_pieces();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  void take_pieces() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < pieces_;) (*body_)(i);
  }

  std::mutex caller_;  // held by the thread whose pieces are being run
  std::mutex mutex_;   // guards what follows, except next_
  std::condition_variable wake_, done_;
  const Body* body_ = nullptr;
  int64_t pieces_ = 0;
  std::atomic<int64_t> next_{0};
  int workers_ = 0;
  int seats_ = 0;   // workers that may still join the current call
  int active_ = 0;  // workers inside take_pieces
};

// Never destroyed: detached workers sleep in it until the process ends.
std::atomic<Pool*> current_pool{nullptr};

// A child has none of its parent's threads, and may have copied locks that are held: leave that
// pool behind.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });

Pool& pool() {
  Pool* found = current_pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  Pool* fresh = new Pool;
  if (current_pool.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

}  // namespace

void parallel_for(int64_t pieces, int threads, const Body& body) {
  if (threads > 1 && pieces > 1 && pool().run(pieces, threads, body)) return;
  for (int64_t i = 0; i < pieces; ++i) body(i);
}

}  // namespace pipekernels
