#include "pipekernels/shared_memory/symmetric_heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pipekernels/shared_memory/process.h"

namespace pipekernels {
namespace {

constexpr int kWindow = 64;                 // Releases over which the peak use is taken.
constexpr size_t kMinKeptBytes = 16 << 20;  // Freed pages up to this size are always kept.

}  // namespace

SymmetricHeap::SymmetricHeap(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)),
      base_(segment_->heap(rank)),
      process_(process_generation()),
      free_list_(kHeapBytes) {}

std::byte* SymmetricHeap::allocate(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t before = free_list_.used();
  const auto offset = free_list_.allocate(bytes);
  if (!offset) {
    throw std::runtime_error("no room for " + std::to_string(bytes) +
                             " bytes of symmetric memory: " + std::to_string(before) + " of " +
                             std::to_string(kHeapBytes) +
                             " are in use; drop symmetric tensors that are no longer needed");
  }
  kept_bytes_ -= std::min(kept_bytes_, free_list_.used() - before);
  peak_ = std::max(peak_, free_list_.used());
  return base_ + *offset;
}

void SymmetricHeap::release(std::byte* block) {
  if (process_ != process_generation()) return;  // In a forked child, the parent owns the block.
  std::lock_guard<std::mutex> lock(mutex_);
  kept_bytes_ += free_list_.release(block - base_);
  if (++window_ == kWindow) {
    window_ = 0;
    last_peak_ = peak_;
    peak_ = free_list_.used();
  }
  if (kept_bytes_ > std::max(kMinKeptBytes, std::max(peak_, last_peak_))) trim();
}

void SymmetricHeap::trim() {
  const size_t page = sysconf(_SC_PAGESIZE);
  for (const auto& [offset, size] : free_list_.free()) {
    const size_t begin = (offset + page - 1) / page * page;
    const size_t end = (offset + size) / page * page;
    if (begin < end) madvise(base_ + begin, end - begin, MADV_REMOVE);
  }
  kept_bytes_ = 0;
}

void SymmetricHeap::isolate(std::byte* data, size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::byte* begin = data - address % page;
  const size_t size = (data + bytes - begin + page - 1) / page * page;
  void* own = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED) return;
  std::memcpy(own, begin, size);
  if (mremap(own, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, begin) == MAP_FAILED)
    munmap(own, size);
}

bool SymmetricHeap::contains(const void* data, size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  return begin >= base_ && begin <= base_ + kHeapBytes &&
         bytes <= size_t(base_ + kHeapBytes - begin);
}

}  // namespace pipekernels
