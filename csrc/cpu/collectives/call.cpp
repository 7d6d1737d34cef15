#include "pipekernels/collectives/call.h"

namespace pipekernels {

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

std::string describe(const Call& call) {
  const auto operation = static_cast<Operation>(static_cast<uint8_t>(call.operation) & ~kOnCuda);
  std::string text = name_of(operation);
  if (operation == Operation::kBarrier) return text + "()";
  if (operation == Operation::kAllToAll) return text + "(" + name_of(call.dtype) + ")";
  text += "(" + std::to_string(call.count) + " x " + name_of(call.dtype);
  const std::string root = std::to_string(call.root);
  const bool sends = operation == Operation::kBroadcast || operation == Operation::kScatter;
  if (sends) return text + ", src=" + root + ")";
  if (operation == Operation::kGather) return text + ", dst=" + root + ")";
  if (operation != Operation::kAllGather) text += std::string(", ") + name_of(call.reduction);
  if (operation == Operation::kAllReduce) text += std::string(", ") + name_of(call.algorithm);
  if (operation == Operation::kReduce) text += ", dst=" + root;
  return text + ")";
}

std::string describe_mismatch(const Call* calls, const int* ranks, int count) {
  std::string text = "the ranks call different collectives: ";
  bool only_shapes = true, only_devices = true;
  for (int i = 0; i < count; ++i) {
    text += (i ? ", " : "") + rank_name(ranks[i]) + " " + describe(calls[i]);
    Call reshaped = calls[i];
    reshaped.shape = calls[0].shape;
    only_shapes = only_shapes && same_call(reshaped, calls[0]);
    only_devices = only_devices && same_call(on_cuda(calls[i]), on_cuda(calls[0]));
  }
  if (only_devices) return text + ", but not all of them on CUDA tensors";
  return only_shapes ? text + ", but of different shapes" : text;
}

void throw_peer_failure(int rank, uint32_t status) {
  constexpr const char* what[] = {" has died", " has closed its communicator",
                                  " gave up after an error of its own", " did not arrive in time",
                                  " called another collective"};
  const Reason reason = RankStatus::reason(status);
  const int culprit = RankStatus::is_failed(status) ? RankStatus::culprit(status) : rank;
  std::string message = rank_name(culprit) + what[static_cast<int>(reason)];
  if (culprit != rank) message += ", as " + rank_name(rank) + " has noticed";
  if (reason == Reason::kTimedOut) throw TimeoutError(culprit, message);
  throw PeerError(culprit, reason, message);
}

}  // namespace pipekernels
