#include "pipekernels/shared_memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace pipekernels {
namespace {

constexpr size_t kAlignment = 2 << 20;  // The size of a huge page.

size_t round_up(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void check_world_size(int world_size) {
  if (world_size >= 1 && world_size <= kMaxRanks) return;
  throw std::invalid_argument("world_size must be in 1.." + std::to_string(kMaxRanks) + ", got " +
                              std::to_string(world_size));
}

}  // namespace

Segment::Segment(int world_size)
    : world_size_(world_size),
      buffers_(round_up(world_size * (sizeof(RankState) + sizeof(DeviceGrowth)))),
      heaps_(round_up(buffers_ + world_size * kBuffersStride)),
      lanes_(heaps_ + world_size * kHeapStride) {}

int Segment::create(int world_size) {
  check_world_size(world_size);
  const int fd = memfd_create("pipekernels", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_errno("memfd_create failed");
  const auto size = static_cast<off_t>(Segment(world_size).size());
  // Sealed, so that no rank can shrink the file while others have it mapped.
  if (ftruncate(fd, size) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    throw_errno("cannot create a sparse file of " + std::to_string(size >> 30) + " GiB in memory" +
                (error == EFBIG ? " (see ulimit -f)" : ""));
  }
  return fd;
}

std::shared_ptr<Segment> Segment::map(int fd, int world_size) {
  check_world_size(world_size);
  std::shared_ptr<Segment> segment(new Segment(world_size));
  struct stat status;
  if (fstat(fd, &status) != 0) throw_errno("fstat failed");
  if (static_cast<size_t>(status.st_size) != segment->size()) {
    throw std::runtime_error("the shared memory has " + std::to_string(status.st_size) +
                             " bytes instead of " + std::to_string(segment->size()) +
                             ": the ranks must run the same version of pipekernels");
  }
  void* base =
      mmap(nullptr, segment->size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    throw_errno("cannot map " + std::to_string(segment->size() >> 30) +
                " GiB of address space (see ulimit -v)");
  }
  segment->base_ = static_cast<std::byte*>(base);
  // The following calls are optional: they avoid later page faults, and older kernels lack some.
#ifdef MADV_POPULATE_WRITE
  madvise(base, world_size * sizeof(RankState), MADV_POPULATE_WRITE);
#endif
  madvise(segment->heap(0), segment->lanes_ - segment->heaps_, MADV_HUGEPAGE);
  madvise(base, segment->size(), MADV_DONTDUMP);  // A core dump would touch every page.
  return segment;
}

void Segment::touch_staging([[maybe_unused]] int rank) const {
#ifdef MADV_POPULATE_WRITE
  madvise(buffers(rank), kMailboxes, MADV_POPULATE_WRITE);  // Optional, as in map().
#endif
}

Segment::~Segment() {
  if (base_) munmap(base_, size());
}

}  // namespace pipekernels
