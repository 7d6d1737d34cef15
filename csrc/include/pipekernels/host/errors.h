// What a collective can throw besides std::invalid_argument for a rank's own arguments.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pipekernels {

// Why a rank no longer takes part.
enum class Reason : uint8_t { kDied, kClosed, kAborted, kTimedOut, kMismatched };

// Rank `rank` has died, closed its communicator or given up.
class PeerError : public std::runtime_error {
 public:
  PeerError(int rank, Reason reason, const std::string& message)
      : std::runtime_error(message), rank(rank), reason(reason) {}
  const int rank;
  const Reason reason;
};

// A rank did not arrive in time; `rank` is the first that was missing.
class TimeoutError : public std::runtime_error {
 public:
  TimeoutError(int rank, const std::string& message) : std::runtime_error(message), rank(rank) {}
  const int rank;
};

// The ranks called different collectives. Raised on all of them; the communicator stays usable.
class MismatchError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace pipekernels
