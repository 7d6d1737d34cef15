// What a rank publishes to its peers: the collective that it calls, and its own status.
#pragma once

#include <cstdint>
#include <string>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/errors.h"
#include "pipekernels/host/host_device.h"

namespace pipekernels {

enum class Operation : uint8_t {
  kBarrier,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
};
constexpr int kCalls = 9;

constexpr const char* name_of(Operation operation) {
  constexpr const char* names[kCalls] = {"barrier",    "all_reduce", "reduce_scatter",
                                         "all_gather", "broadcast",  "reduce",
                                         "gather",     "scatter",    "all_to_all"};
  return names[static_cast<int>(operation)];
}

constexpr int kMaxRanks = 1024;
constexpr int kShapeBits = 22;

// The parameters of a collective, which must be equal on all ranks.
struct Call {
  Operation operation = Operation::kBarrier;
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  uint32_t root : 10;           // The rank that sends or receives, if only one does.
  uint32_t shape : kShapeBits;  // A digest of the shape of this rank's input.
  uint64_t count = 0;           // Elements of this rank's input.
};
static_assert(sizeof(Call) == 16 && kMaxRanks <= 1 << 10);

// Marks a call as one on CUDA tensors. Ranks that are threads compare calls on CPU and CUDA tensors
// through the same shared memory.
constexpr uint8_t kOnCuda = 0x80;  // A bit of Operation.
inline Call on_cuda(Call call) {
  call.operation = static_cast<Operation>(static_cast<uint8_t>(call.operation) | kOnCuda);
  return call;
}

// What a rank publishes with the first signal of a collective.
struct Descriptor {
  Call call{};
  // Where peers can read and write this rank's data. On a CPU: an offset in the segment if the
  // ranks are processes, an address if they are threads. On CUDA: see kLocationBits. 0: peers
  // cannot access the data, which are copied through the staging.
  uint64_t location = 0;
};

PK_HOST_DEVICE inline bool same_call(const Call& a, const Call& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.reduction == b.reduction &&
         a.algorithm == b.algorithm && a.root == b.root && a.shape == b.shape && a.count == b.count;
}

// The status of a rank: open, closed, or failed, with the reason and the rank that caused it.
struct RankStatus {
  static constexpr uint32_t kOpen = 0;
  static constexpr uint32_t kClosed = 1;
  PK_HOST_DEVICE static constexpr uint32_t failed(Reason reason, int culprit) {
    return 2 | static_cast<uint32_t>(reason) << 8 | static_cast<uint32_t>(culprit) << 16;
  }
  PK_HOST_DEVICE static constexpr bool is_failed(uint32_t status) { return status > kClosed; }
  PK_HOST_DEVICE static constexpr Reason reason(uint32_t status) {
    return status == kClosed ? Reason::kClosed : static_cast<Reason>(status >> 8 & 0xff);
  }
  PK_HOST_DEVICE static constexpr int culprit(uint32_t status) {
    return static_cast<int>(status >> 16);
  }
};

std::string rank_name(int rank);

// For error messages: "all_reduce(10 x float32, sum, auto)".
std::string describe(const Call& call);

// The message of a MismatchError: lists the call of each of `count` ranks.
std::string describe_mismatch(const Call* calls, const int* ranks, int count);

// Throws the error that the status of `rank`, closed or failed, causes on its peers.
[[noreturn]] void throw_peer_failure(int rank, uint32_t status);

}  // namespace pipekernels
