// What a rank calls, and what it says of itself: the words by which ranks understand each other.
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
  kAllReduceWhenReady,
};

constexpr int kMaxRanks = 1024;
constexpr int kShapeBits = 22;

// Equal on all ranks.
struct Call {
  Operation operation = Operation::kBarrier;
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  // Of a broadcast: who sends. Of kAllReduceWhenReady: the number of thread blocks.
  uint32_t root : 10;
  uint32_t shape : kShapeBits;  // A digest of the shape of this rank's input.
  uint64_t count = 0;           // Elements of this rank's input.
};
static_assert(sizeof(Call) == 16 && kMaxRanks <= 1 << 10);

// The same call on CUDA tensors, for ranks that are threads: they meet on the CPU for both kinds.
constexpr uint8_t kOnCuda = 0x80;  // Of an Operation.
inline Call on_cuda(Call call) {
  call.operation = static_cast<Operation>(static_cast<uint8_t>(call.operation) | kOnCuda);
  return call;
}

// What a rank publishes with the first signal of a collective.
struct Descriptor {
  Call call{};
  // Where peers can read and write this rank's data. On a CPU: an offset in the segment if the
  // ranks are processes, an address if they are threads. On CUDA: an offset in the rank's device
  // memory. 0: nowhere, peers see what is copied to the staging.
  uint64_t location = 0;
};

PK_HOST_DEVICE inline bool same(const Call& a, const Call& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.reduction == b.reduction &&
         a.algorithm == b.algorithm && a.root == b.root && a.shape == b.shape && a.count == b.count;
}

// What a rank says of itself: open, closed, or that it has failed, why, and because of which rank.
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

// For messages: "all_reduce(10 x float32, sum, auto)".
std::string describe(const Call& call);

// "the ranks call different collectives: " and what those calls are, each after its rank's name.
std::string describe_mismatch(const Call* calls, const int* ranks, int count);

// Throws what it means for others that `rank` has this status.
[[noreturn]] void throw_gone(int rank, uint32_t status);

}  // namespace pipekernels
