// One rank's end of a communicator on its CUDA device. This header needs no CUDA header.
//
// It builds on a communicator of the CPU. Through that one the ranks exchange handles of their
// device memory, and a watcher thread looks there whether a peer has died, closed or failed, and
// then stops kernels that would wait for it. The kernels themselves access only device memory and
// HostFlags.
//
// Ranks that are threads of one process launch together: they synchronise on the CPU before and
// after each launch. Otherwise a kernel could wait on its device for a kernel that another rank's
// thread cannot launch, because a third rank or another communicator makes a call that waits until
// the device is idle (loads a kernel, frees memory). A mismatch of calls is also found there, and
// leaves the communicator usable. In autograd's threads the ranks cannot synchronise, see
// CudaCaller: there the first launch of a kernel may have to wait until the device is idle, that
// is, until the kernel of another rank times out. Ranks that are processes launch independently.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/shared_memory/device_memory.h"
#include "pipekernels/shared_memory/free_list.h"

namespace pipekernels {

// See csrc/cuda/shared_memory/owned_memory.cuh.
class DeviceMemory;
struct MappedMemory;

// The allocator of a rank's symmetric tensors. It begins with a part of the rank's device memory
// and grows by allocations that double it, up to `limit` bytes in all.
class CudaHeap {
 public:
  // `memory` has room for first_bytes(limit) at `begin`. The rank of `core` publishes growths in
  // its segment.
  CudaHeap(std::shared_ptr<DeviceMemory> memory, size_t begin, size_t limit, int device,
           const Communicator& core);
  ~CudaHeap();
  // The size of its part of the first memory.
  static size_t first_bytes(size_t limit);

  // Returns a block for use in `stream`, or null if nothing fits. Makes `stream` wait for what
  // other streams did with released blocks. If a graph is being captured in `stream`, the block is
  // the graph's: only that capture is given it again. Captures get half of the limit at most.
  std::byte* allocate(size_t bytes, void* stream);
  // Notes that a collective in `stream` uses `data`, which need not be in a block. If a graph has
  // captured it, which may use the block at any time, the block is never given out again.
  void use(const void* data, void* stream, bool captured);
  // Work that is in the streams of allocate() and use() by now may use the block until its end.
  void release(std::byte* block);
  // Where peers find `data`, see kLocationBits, or 0 if they are not in this heap.
  uint64_t location_of(const void* data, size_t bytes) const;
  // The address of growth `i`.
  std::byte* growth(int i) const;

 private:
  // One allocation's part for blocks.
  struct Part {
    std::shared_ptr<DeviceMemory> memory;
    size_t begin;
    FreeList free_list;
    std::byte* base() const;
    bool contains(const void* data, size_t bytes) const;
  };
  struct Use {
    size_t bytes;
    std::vector<void*> streams;
    bool captured;                              // Whether a graph has captured a use.
    std::optional<unsigned long long> capture;  // In which it was allocated.
  };
  // The end of what a stream did with released blocks. Its identifier, unlike its handle, is never
  // that of another stream.
  struct Released {
    unsigned long long stream;
    void* end;  // a cudaEvent_t
  };
  // Notes that what `stream` does by now may use released blocks. Returns false on a CUDA error.
  bool note_end(void* stream);
  std::byte* allocate_captured(size_t bytes, void* stream, unsigned long long capture);
  // Finds room for a block. Returns null if there is none.
  std::byte* place(size_t bytes);
  bool grow(size_t bytes);
  void free(std::byte* block);
  Part* part_of(const void* data, size_t bytes) const;

  const size_t limit_;
  const int device_;
  const std::shared_ptr<Segment> segment_;
  const int rank_;
  const bool is_threads_;
  const unsigned process_;
  mutable std::mutex mutex_;
  mutable std::vector<Part> parts_;  // Never reallocated: threads that are peers copy `memory`.
  using Uses = std::map<std::byte*, Use, std::less<>>;
  Uses uses_;                       // Of each block.
  Uses idle_;                       // Of blocks that captures have released.
  size_t captured_bytes_ = 0;       // Of blocks allocated in captures.
  std::vector<Released> released_;  // One per stream.
};

// Owns a block of a CudaHeap.
class CudaBuffer {
 public:
  CudaBuffer(std::shared_ptr<CudaHeap> heap, std::byte* data, size_t bytes)
      : heap_(std::move(heap)), data_(data), bytes_(bytes) {}
  ~CudaBuffer() { heap_->release(data_); }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<CudaHeap> heap_;
  std::byte* const data_;
  const size_t bytes_;
};

// The symmetric memory of a communicator's ranks, as one of them sees it. A communicator that was
// split off another one shares that one's `heap` and `mapped`.
struct SymmetricMemory {
  std::shared_ptr<CudaHeap> heap;  // This rank's.
  std::shared_ptr<MappedMemory> mapped;
  int rank;
  int owners[kMaxDeviceRanks];  // Of each rank, its number in `mapped`.
  int known[kMaxDeviceRanks];   // How many growths of each rank learn() has seen.

  // Whether a rank has added memory that learn() has not seen.
  bool has_grown(int world_size) const;
  // Writes the addresses of added memory to `ranks`, and tells the peers that the launches of this
  // rank from number `launch` on know them.
  void learn(const Communicator& core, DeviceRanks& ranks, uint64_t launch);
  // Where all peers can access `data` in launch number `launch`, or 0.
  uint64_t location_of(const Communicator& core, const void* data, size_t bytes,
                       uint64_t launch) const;
};

// The context of a call of a collective.
struct CudaCaller {
  void* stream;
  // Whether the calling thread may wait for the threads of other ranks. It must not in autograd's
  // threads: unless its multithreading is disabled, autograd has one thread per device, which runs
  // the backwards of all ranks in turn.
  bool may_meet;
};

class CudaCommunicator {
 public:
  // All ranks of `core`, which must outlive this object, construct theirs together; of several,
  // only one may grow its memory. `most_blocks`: the most thread blocks of a kernel of this rank.
  // `symmetric_bytes`: the most that its symmetric tensors may take. `parent`: this rank's
  // communicator that `core` was split off, or null; if it is open and on the same device on all
  // ranks, its symmetric memory is shared, and `symmetric_bytes` ignored. Throws std::runtime_error
  // on all ranks if one of them cannot use its device, or has another `most_blocks`.
  CudaCommunicator(Communicator& core, int device, size_t symmetric_bytes,
                   int most_blocks = kMaxDeviceBlocks, CudaCommunicator* parent = nullptr);
  ~CudaCommunicator();
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;

  int device() const { return device_; }
  int rank() const { return ranks_.rank; }
  int world_size() const { return ranks_.layout.ranks; }
  const DeviceRanks& ranks() const { return ranks_; }

  // The ranks that do not get what each other's device writes to their memory, or empty; the same
  // on all ranks. If there are any, this communicator must be closed without a call.
  const std::string& broken_links() const { return broken_links_; }
  // Whether the ranks have more than two devices, which NVLink does not join with each other; the
  // same on all ranks.
  bool has_slow_links() const { return slow_links_; }

  // Returns null if there is no room.
  std::unique_ptr<CudaBuffer> allocate(size_t bytes, void* stream);
  // Where all peers' kernels can access `data` in the next launch, in `stream`; 0 if one cannot.
  uint64_t location_of(const void* data, size_t bytes, void* stream);

  // Throws if this communicator is closed, or has failed on the device or on the CPU.
  void check();
  // Waits until the last collective of this rank that was not captured has ended; then check().
  void synchronize();
  // DeviceLayout::wide_loads of later launches, for measurements.
  void set_wide_loads(bool wide) { ranks_.layout.wide_loads = wide; }

  // Launches `kernel`, which takes a DeviceLaunch, ordered after this rank's earlier collectives.
  void launch(const void* kernel, const DeviceLaunch& launch, const CudaCaller& caller);

  // Waits for this rank's collectives, after stopping them if `abort`. Must be called before the
  // core communicator is closed.
  void close(bool abort);

 private:
  struct SetupMessage;
  struct Events;
  struct FreeFlags {
    unsigned process;
    void operator()(HostFlags* flags) const;
  };

  void set_up(size_t symmetric_bytes, int most_blocks, CudaCommunicator* parent);
  // What a child may share; without a heap if this communicator is closed.
  SymmetricMemory shared_memory();
  void agree_on_layout(int most_blocks, SymmetricMemory parents);
  void share_memory(size_t symmetric_bytes);
  void check_peers();
  static bool lacks_nvlink(const std::vector<SetupMessage>& all);
  void run_check(const void* kernel);
  void make_events();
  void exchange(SetupMessage& mine, std::vector<SetupMessage>& all);
  void enqueue(const void* kernel, const DeviceLaunch& launch, void* stream);
  void record(void* stream);
  void launch_together(const void* kernel, const DeviceLaunch& launch, void* stream);
  void watch();
  void stop(int rank, uint32_t status);
  std::unique_lock<std::mutex> lock();
  void require_usable();
  [[noreturn]] void throw_failure();
  const char* advice() const;
  void drain();
  void tear_down();

  Communicator& core_;
  const int device_;
  const unsigned process_;
  const std::shared_ptr<Segment> segment_;
  DeviceRanks ranks_{};
  std::shared_ptr<MappedMemory> memory_;
  SymmetricMemory symmetric_{};  // With the memory of a parent, or `memory_`.
  uint64_t launches_ = 0;        // That were not captured.
  std::string broken_links_;
  bool slow_links_ = false;
  std::unique_ptr<HostFlags, FreeFlags> flags_{nullptr, FreeFlags{process_}};
  std::unique_ptr<Events> events_;

  std::mutex mutex_;  // Held by each call; guards the flags below.
  bool closed_ = false;
  bool failed_ = false;
  bool captured_ = false;  // Whether a CUDA graph has captured a launch.

  int wake_ = -1;  // An eventfd that ends the watcher thread.
  std::unique_ptr<std::thread> watcher_;
};

// Each collective's file adds its kernels to those that the constructor loads.
using KernelList = std::vector<const void*>;
void add_all_reduce_kernels(KernelList& kernels);
void add_reduce_scatter_kernels(KernelList& kernels);
void add_all_gather_kernels(KernelList& kernels);
void add_broadcast_kernels(KernelList& kernels);

// The kernels of peer_check_block.cuh.
struct PeerCheck {
  const void* write;
  const void* compare;
};
PeerCheck peer_check();

constexpr int kDeviceThreads = 256;  // Per block; more would spill registers.

}  // namespace pipekernels
