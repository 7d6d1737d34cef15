#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/copy.h"

namespace pipekernels {

// As all_gather(): every rank copies a block of each part to its staging, peers read their own. In
// the first round the blocks follow the sizes of the parts, bytes for each rank and bytes from
// each: every rank compares the sizes of all, and finds the same number of rounds.
void exchange(Communicator& communicator, const Call& call, const std::vector<Part>& sent,
              const std::vector<Part>& received) {
  const int me = communicator.rank();
  const int ranks = communicator.world_size();
  if (std::max(sent.size(), received.size()) != static_cast<size_t>(ranks) ||
      sent.size() != received.size()) {
    throw std::invalid_argument(std::string(name_of(call.operation)) +
                                " needs a part for each of " + std::to_string(ranks) +
                                " ranks, got " + std::to_string(sent.size()) + " and " +
                                std::to_string(received.size()));
  }
  // A rank's own part is not staged; of a gather one part is.
  const bool has_one = call.operation == Operation::kGather || ranks == 1;
  const size_t header = (2 * ranks * sizeof(uint64_t) + 63) / 64 * 64;
  const size_t block = (kStagingBytes - header) / (has_one ? 1 : ranks - 1) / 64 * 64;

  run_collective(communicator, call, nullptr, 0, [&](Collective& collective) {
    // Copies block `k` of the part from `from` to `to`, or to the staging if `to` is another rank.
    const auto copy = [&](int from, int to, size_t k) {
      const Part& part = from == me ? sent[to] : received[from];
      const size_t begin = std::min(part.bytes, k * block);
      const size_t bytes = std::min(part.bytes - begin, block);
      std::byte* const staged =
          collective.staging(from, k) + header + (has_one ? 0 : to - (to > from)) * block;
      std::byte* const own = static_cast<std::byte*>(part.data) + begin;
      copy_bytes(from == me ? staged : own, from == me ? own : staged, bytes);
    };
    const auto copy_in = [&](size_t k) {
      for (int to = 0; to < ranks; ++to) {
        if (to != me) copy(me, to, k);
      }
    };
    // In blocks too, as memcpy() of many bytes passes by the caches.
    const auto copy_own = [&](size_t k) {
      const size_t whole = std::min(sent[me].bytes, received[me].bytes);
      const size_t begin = std::min(whole, k * block);
      copy_bytes(static_cast<std::byte*>(received[me].data) + begin,
                 static_cast<const std::byte*>(sent[me].data) + begin,
                 std::min(whole - begin, block));
    };
    const auto sizes_of = [&](int rank) {
      return reinterpret_cast<uint64_t*>(collective.staging(rank, 0));
    };

    for (int rank = 0; rank < ranks; ++rank) {
      sizes_of(me)[rank] = sent[rank].bytes;
      sizes_of(me)[ranks + rank] = received[rank].bytes;
    }
    copy_in(0);
    collective.signal();
    copy_own(0);
    collective.wait();
    uint64_t most = 1;
    for (int from = 0; from < ranks; ++from) {
      for (int to = 0; to < ranks; ++to) {
        const uint64_t bytes = sizes_of(from)[to], wanted = sizes_of(to)[ranks + from];
        most = std::max(most, bytes);
        if (bytes == wanted) continue;
        collective.finish_rounds(1);  // The ranks stay in step; peers may still read the sizes.
        throw MismatchError(std::string("in ") + name_of(call.operation) + " " + rank_name(from) +
                            " sends " + std::to_string(bytes) + " bytes to " + rank_name(to) +
                            ", which receives " + std::to_string(wanted));
      }
    }
    const size_t rounds = (most + block - 1) / block;
    for (size_t k = 0; k < rounds; ++k) {
      if (k + 1 < rounds) {
        copy_in(k + 1);
        collective.signal();
      }
      for (int from = 0; from < ranks; ++from) {
        if (from != me) copy(from, me, k);
      }
      if (k + 1 < rounds) {
        copy_own(k + 1);
        collective.wait();
      }
    }
    collective.finish_rounds(rounds);
  });
}

}  // namespace pipekernels
