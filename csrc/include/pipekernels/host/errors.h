// The exceptions of collectives, besides std::invalid_argument for a rank's own arguments.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pipekernels {

// Why a rank has left the communicator.
enum class Reason : uint8_t { kDied, kClosed, kAborted, kTimedOut, kMismatched };

// Rank `rank` has died, closed its communicator, or failed.
class PeerError : public std::runtime_error {
 public:
  PeerError(int rank, Reason reason, const std::string& message)
      : std::runtime_error(message), rank(rank), reason(reason) {}
  const int rank;
  const Reason reason;
};

// A rank did not arrive within the timeout. If several are missing, `rank` is the first of them.
class TimeoutError : public std::runtime_error {
 public:
  TimeoutError(int rank, const std::string& message) : std::runtime_error(message), rank(rank) {}
  const int rank;
};

// The ranks called different collectives. Thrown on all ranks; the communicator stays usable.
class MismatchError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace pipekernels
