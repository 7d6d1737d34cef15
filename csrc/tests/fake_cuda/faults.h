// Links between devices that do not do what the driver says.
#pragma once

#include <mutex>
#include <vector>

#include "streams.h"

namespace fake_cuda {

inline bool nvlink = true;
inline char own_gpu = 0;  // Tells this process's GPU from those of others.

// What happens to writes over the link `from` one device, or rank, `to` another one.
struct Fault {
  enum { kNone, kDropped, kLate, kCorrupt } kind = kNone;
  int from = -1, to = -1;
};
inline Fault fault;

// Of a link that delays them.
inline std::vector<Task> late_writes;
inline void deliver_late_writes() {
  for (const Task& write : late_writes) write();
  late_writes.clear();
}

// In place of `write`, to memory that begins at `target`, over a faulty link.
inline void go_wrong(const Task& write, void* target) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> hold(mutex);
  if (fault.kind == Fault::kLate) late_writes.push_back(write);
  if (fault.kind != Fault::kCorrupt) return;
  write();
  __atomic_fetch_xor(static_cast<unsigned char*>(target), 1, __ATOMIC_RELAXED);
}

}  // namespace fake_cuda
