// One rank's end of a communicator on its CUDA device. No header of CUDA is needed here.
//
// A communicator of the CPU is its beginning and its ear: through it the ranks exchange handles of
// their device memory, and a thread watches there whether a peer has died, closed or failed, to
// stop kernels that would wait for it. The kernels themselves know only device memory and
// HostFlags.
//
// Ranks that are threads of one process launch together: they meet on the CPU before each launch,
// and after it. So no rank's kernel waits on a device for one that another rank's host thread
// cannot launch, because a third one, or another communicator, does what needs the device to be
// idle (loads a kernel, frees memory); and different calls are found there, with the communicator
// as usable as before. In autograd's threads they cannot meet, see CudaCaller: there the first
// launch of a kernel may have to wait until the device is idle, hence until another rank gives up
// waiting. Ranks that are processes launch as they come.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/shared_memory/device_memory.h"
#include "pipekernels/shared_memory/free_list.h"

namespace pipekernels {

// A rank's device memory; freed when nobody has it mapped.
class DeviceMemory;

// The part of a rank's device memory that it hands out as symmetric tensors.
class CudaHeap {
 public:
  CudaHeap(std::shared_ptr<DeviceMemory> memory, size_t begin, size_t capacity);

  // For use in `stream`, which then comes after what the streams of earlier owners hold. Returns
  // null if there is no room.
  std::byte* allocate(size_t bytes, void* stream);
  void release(std::byte* block, void* stream);
  // The offset in the rank's memory, or 0 if the data are elsewhere.
  uint64_t location_of(const void* data, size_t bytes) const;

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  std::byte* const base_;
  const size_t begin_;
  const unsigned process_;
  std::mutex mutex_;
  FreeList parts_;
  std::vector<void*> streams_;  // Of blocks released.
};

// Memory that is given back with this object.
class CudaBuffer {
 public:
  CudaBuffer(std::shared_ptr<CudaHeap> heap, std::byte* data, size_t bytes, void* stream)
      : heap_(std::move(heap)), data_(data), bytes_(bytes), stream_(stream) {}
  ~CudaBuffer() { heap_->release(data_, stream_); }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<CudaHeap> heap_;
  std::byte* const data_;
  const size_t bytes_;
  void* const stream_;
};

// Who calls a collective.
struct CudaCaller {
  void* stream;
  // Whether its thread may wait for those of other ranks. Autograd has one thread for each device,
  // in which the backwards of all ranks take turns, unless it is told to use none.
  bool may_meet;
};

class CudaCommunicator {
 public:
  // A collective over `core`, which must outlive this object, with one device for each rank. Throws
  // std::runtime_error on all ranks if one of them cannot take part.
  CudaCommunicator(Communicator& core, int device, size_t symmetric_bytes);
  ~CudaCommunicator();
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;

  int device() const { return device_; }
  int rank() const { return ranks_.rank; }
  int world_size() const { return ranks_.layout.ranks; }
  const DeviceRanks& ranks() const { return ranks_; }

  // Null if there is no room.
  std::unique_ptr<CudaBuffer> allocate(size_t bytes, void* stream);
  uint64_t location_of(const void* data, size_t bytes) const;

  // Throws what has ended this communicator, on the device or else.
  void check();
  // Waits until the last collective of this rank that was not captured has ended; then check().
  void synchronize();

  // Launches `kernel`, which takes a DeviceLaunch, after this rank's earlier ones.
  void launch(const void* kernel, const DeviceLaunch& launch, const CudaCaller& caller);

  // Waits for this rank's collectives, or stops them if `abort`. Before that of the core.
  void close(bool abort);

 private:
  struct Card;
  struct Events;
  struct FreeFlags {
    unsigned process;
    void operator()(HostFlags* flags) const;
  };

  void set_up(size_t symmetric_bytes);
  void agree_on_layout();
  void share_memory(size_t symmetric_bytes);
  void exchange(Card& mine, std::vector<Card>& all);
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
  std::shared_ptr<DeviceMemory> memory_;
  std::vector<std::shared_ptr<DeviceMemory>> peers_;  // If the ranks are threads.
  std::vector<void*> mapped_;                         // If they are processes.
  std::shared_ptr<CudaHeap> heap_;
  std::unique_ptr<HostFlags, FreeFlags> flags_{nullptr, FreeFlags{process_}};
  std::unique_ptr<Events> events_;

  std::mutex mutex_;  // Held by each call.
  bool closed_ = false;
  bool failed_ = false;
  bool captured_ = false;  // Whether a graph holds launches.

  int wake_ = -1;  // An eventfd that ends the watcher.
  std::unique_ptr<std::thread> watcher_;
};

// What each collective adds to the kernels that set-up loads.
using KernelList = std::vector<const void*>;
void add_all_reduce_kernels(KernelList& kernels);
void add_reduce_scatter_kernels(KernelList& kernels);
void add_all_gather_kernels(KernelList& kernels);
void add_broadcast_kernels(KernelList& kernels);

constexpr int kDeviceThreads = 256;  // Of a block: as many as have registers without spills.

}  // namespace pipekernels
