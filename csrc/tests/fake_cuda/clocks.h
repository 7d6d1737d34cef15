// Vector clocks, which say for any two accesses to memory whether events order them, whatever the
// order in which they happen to run.
//
// Everything is entered when it is issued. An agent, a stream or the process, has a clock: how much
// of every agent's work has ended before the agent's next work begins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "../check.h"

namespace fake_cuda {

using Clock = std::map<const void*, uint64_t>;  // By the agents' addresses.

inline void follow(Clock& later, const Clock& earlier) {
  for (const auto& [agent, time] : earlier) later[agent] = std::max(later[agent], time);
}

struct Range {
  const void* base;
  size_t bytes;
};

// The accesses to memory that later ones may have to wait for. Aborts where one does not.
class Accesses {
 public:
  // `host`: the process's clock. What it has waited for comes before all that is issued later.
  void add(const void* agent, Clock& clock, const Clock& host, const std::vector<Range>& reads,
           const std::vector<Range>& writes) {
    const auto has_ended = [&](const Access& before) {
      const auto seen = host.find(before.agent);
      return seen != host.end() && seen->second >= before.time;
    };
    accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), has_ended), accesses_.end());
    const uint64_t time = ++clock[agent];
    for (const Range& range : reads) add_one(agent, time, clock, range, false);
    for (const Range& range : writes) add_one(agent, time, clock, range, true);
  }

  // All accesses to memory that is freed have ended.
  void forget(const Range& range) {
    const auto begin = reinterpret_cast<uintptr_t>(range.base), end = begin + range.bytes;
    const auto is_inside = [&](const Access& before) {
      return begin <= before.begin && before.end <= end;
    };
    accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_inside), accesses_.end());
  }

 private:
  struct Access {
    uintptr_t begin, end;
    const void* agent;
    uint64_t time;
    bool writes;
  };

  void add_one(const void* agent, uint64_t time, const Clock& clock, const Range& range,
               bool writes) {
    const auto begin = reinterpret_cast<uintptr_t>(range.base), end = begin + range.bytes;
    for (const Access& before : accesses_) {
      if (before.end <= begin || end <= before.begin || !(writes || before.writes)) continue;
      const auto seen = clock.find(before.agent);
      CHECK(seen != clock.end() && seen->second >= before.time);
    }
    const auto is_covered = [&](const Access& before) {
      return writes && begin <= before.begin && before.end <= end && before.time != time;
    };
    accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_covered),
                    accesses_.end());
    accesses_.push_back({begin, end, agent, time, writes});
  }

  std::vector<Access> accesses_;
};

}  // namespace fake_cuda
