// The symmetric heap: blocks never overlap, freed blocks are reused, and pages are returned.

#include "pipekernels/shared_memory/symmetric_heap.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "check.h"

namespace {

using namespace pipekernels;

std::shared_ptr<Segment> new_segment() {
  const int fd = Segment::create(2);
  auto segment = Segment::map(fd, 2);
  close(fd);
  return segment;
}

void test_random_use() {
  const auto heap = std::make_shared<SymmetricHeap>(new_segment(), 1);
  std::mt19937_64 random(1);
  std::vector<std::pair<std::unique_ptr<SymmetricBuffer>, unsigned char>> held;
  const auto check = [&](size_t i) {
    const auto& [buffer, mark] = held[i];
    for (size_t k = 0; k < buffer->bytes(); ++k) {
      CHECK(static_cast<unsigned char>(buffer->data()[k]) == mark);
    }
  };
  for (int step = 0; step < 3000; ++step) {
    if (held.size() < 30 && random() % 5 < 3) {
      const size_t bytes = random() % (random() % 10 ? 2000 : 500000);
      held.emplace_back(std::make_unique<SymmetricBuffer>(heap, bytes), step % 251);
      const auto& buffer = *held.back().first;
      CHECK(reinterpret_cast<uintptr_t>(buffer.data()) % 128 == 0);
      CHECK(heap->contains(buffer.data(), bytes));
      std::memset(buffer.data(), step % 251, bytes);
    } else if (!held.empty()) {
      const size_t i = random() % held.size();
      check(i);
      std::swap(held[i], held.back());
      held.pop_back();
    }
  }
  for (size_t i = 0; i < held.size(); ++i) check(i);
}

void test_freed_blocks_merge() {
  const auto heap = std::make_shared<SymmetricHeap>(new_segment(), 0);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<SymmetricBuffer>> held;
    for (int i = 0; i < 100; ++i) held.push_back(std::make_unique<SymmetricBuffer>(heap, i * 1000));
    for (int i = 0; i < 100; i += 2) held[i].reset();
    for (int i = 99; i > 0; i -= 2) held[i].reset();
    SymmetricBuffer all(heap, kHeapBytes);  // Fits only if there are no fragments.
    bool full = false;
    try {
      SymmetricBuffer one_more(heap, 1);
    } catch (const std::runtime_error&) {
      full = true;
    }
    CHECK(full);
  }
}

size_t resident_pages(const std::byte* data, size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> resident((bytes + page - 1) / page);
  CHECK(mincore(const_cast<std::byte*>(data), bytes, resident.data()) == 0);
  size_t pages = 0;
  for (const unsigned char each : resident) pages += each & 1;
  return pages;
}

// A loop that reuses large blocks keeps their pages; they are returned once only small blocks are
// in use.
void test_pages() {
  const auto segment = new_segment();
  const auto heap = std::make_shared<SymmetricHeap>(segment, 0);
  constexpr size_t kLarge = 64 << 20;
  const auto use = [&](size_t bytes) {
    SymmetricBuffer buffer(heap, bytes);
    std::memset(buffer.data(), 1, bytes);
  };
  use(kLarge);
  const size_t pages = resident_pages(segment->heap(0), kLarge);
  CHECK(pages >= kLarge / sysconf(_SC_PAGESIZE));
  use(kLarge);
  use(kLarge);
  CHECK(resident_pages(segment->heap(0), 2 * kLarge) == pages);
  for (int i = 0; i < 200; ++i) use(1000);
  CHECK(resident_pages(segment->heap(0), 2 * kLarge) < 100);
}

// A forked child that destroys an inherited buffer does not free its parent's block.
void test_forked_child() {
  const auto heap = std::make_shared<SymmetricHeap>(new_segment(), 0);
  auto buffer = std::make_unique<SymmetricBuffer>(heap, 64 << 20);
  std::memset(buffer->data(), 7, buffer->bytes());
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    buffer.reset();
    for (int i = 0; i < 200; ++i) SymmetricBuffer small(heap, 1000);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  for (size_t i = 0; i < buffer->bytes(); i += 4096) CHECK(buffer->data()[i] == std::byte{7});
}

// After isolate(), contents are kept, writes of others do not arrive, and other pages are still
// shared.
void test_isolate() {
  const int fd = Segment::create(1);
  const auto mine = Segment::map(fd, 1), other = Segment::map(fd, 1);
  close(fd);
  SymmetricHeap heap(mine, 0);
  std::byte* data = mine->heap(0) + 100;
  std::byte* seen_by_other = other->heap(0) + 100;
  constexpr size_t kBytes = 20000;
  std::memset(data, 1, kBytes);
  std::memset(data + kBytes, 2, 50000);
  heap.isolate(data, kBytes);
  std::memset(seen_by_other, 3, 2 * kBytes);
  for (size_t i = 0; i < kBytes; ++i) CHECK(data[i] == std::byte{1});
  CHECK(data[2 * kBytes - 1] == std::byte{3} && data[2 * kBytes] == std::byte{2});
}

void test_contains() {
  const auto segment = new_segment();
  const SymmetricHeap heap(segment, 0);
  int other = 0;
  CHECK(heap.contains(segment->heap(0), kHeapBytes));
  CHECK(!heap.contains(segment->heap(0), kHeapBytes + 1));
  CHECK(!heap.contains(segment->heap(0) - 1, 1));
  CHECK(!heap.contains(segment->heap(1) + 1, 1));
  CHECK(!heap.contains(&other, sizeof(other)));
}

// The hash of the L1 cache of Zen to Zen 4; see kRankSpacing.
int hash_of(const std::byte* place) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  int hash = 0;
  for (int i = 0; i < 8; ++i) hash |= ((address >> (12 + i) ^ address >> (27 - i)) & 1) << i;
  return hash;
}

void test_ranks_do_not_conflict_in_the_cache() {
  const auto segment = new_segment();  // Used only to compute addresses, also of ranks it lacks.
  for (const size_t offset : {size_t{0}, size_t{5} << 12, size_t{123} << 20}) {
    std::set<int> heaps, staging;
    for (int rank = 0; rank < 128; ++rank) {
      heaps.insert(hash_of(segment->heap(rank) + offset));
      staging.insert(hash_of(segment->staging(rank, 1) + offset));
    }
    CHECK(heaps.size() == 128 && staging.size() == 128);
  }
}

}  // namespace

int main() {
  test_random_use();
  test_freed_blocks_merge();
  test_pages();
  test_contains();
  test_forked_child();
  test_isolate();
  test_ranks_do_not_conflict_in_the_cache();
  return 0;
}
