#include "pipekernels/host/parallel_for.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

namespace pipekernels {
namespace {

// The function to which GCC compiles `#pragma omp parallel`, in GNU's and LLVM's runtimes. It calls
// function(argument) on `threads` threads, including the calling one.
using ParallelRegion = void (*)(void (*function)(void*), void* argument, unsigned threads,
                                unsigned flags);

ParallelRegion parallel_region() {
  static const auto found = reinterpret_cast<ParallelRegion>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

bool forked = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Loop {
  const std::function<void(int64_t)>& body;
  const int64_t pieces;
  std::atomic<int64_t> next{0};
};

void take_pieces(void* argument) {
  Loop& loop = *static_cast<Loop*>(argument);
  for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.pieces;) {
    loop.body(i);
  }
}

}  // namespace

void parallel_for(int64_t pieces, int threads, const std::function<void(int64_t)>& body) {
  Loop loop{body, pieces};
  const ParallelRegion run = threads > 1 && pieces > 1 && !forked ? parallel_region() : nullptr;
  if (run == nullptr) return take_pieces(&loop);
  run(&take_pieces, &loop, static_cast<unsigned>(threads), 0);
}

}  // namespace pipekernels
