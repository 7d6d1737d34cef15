// Messages on threads and on processes: values, orders, sizes that differ, lost ranks, and messages
// that move while nobody waits for them.

#include "pipekernels/collectives/messages.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <random>

#include "pipekernels/host/fuzz.h"
#include "ranks.h"
#include "values.h"

namespace {

using namespace pipekernels;
using Clock = std::chrono::steady_clock;
using Started = std::shared_ptr<Message>;

constexpr size_t kLarge = 3 << 20;  // More than a lane's chunks.
constexpr uint32_t kManyTags = 1000;

Bytes content(size_t bytes, uint64_t seed) {
  Bytes found = values(DType::kInt64, bytes / 8 + 1, seed, 0);
  found.resize(bytes);
  return found;
}

Started start_send(Communicator& communicator, const Bytes& data, int peer, uint32_t tag) {
  auto* const memory = const_cast<std::byte*>(data.data());
  return communicator.messages().start(true, memory, data.size(), peer, tag);
}

Started start_receive(Communicator& communicator, Bytes& data, int peer, uint32_t tag) {
  return communicator.messages().start(false, data.data(), data.size(), peer, tag);
}

void send(Communicator& communicator, const Bytes& data, int peer, uint32_t tag) {
  const Started message = start_send(communicator, data, peer, tag);
  CHECK(communicator.messages().wait(*message));
}

int receive(Communicator& communicator, Bytes& data, int peer, uint32_t tag) {
  const Started message = start_receive(communicator, data, peer, tag);
  CHECK(communicator.messages().wait(*message));
  return message->peer;
}

// Every rank sends each rank, itself too, messages of random sizes and tags, and receives them in
// another order.
void pass_messages(Communicator& communicator, uint64_t seed) {
  const int me = communicator.rank(), ranks = communicator.world_size();
  std::mt19937_64 shared(seed), own(seed * 8 + me);
  struct Planned {
    int from, to;
    uint32_t tag;
    Bytes sent, received{};
    Started message{};
  };
  std::vector<Planned> plan;
  constexpr size_t limits[] = {1, 100, 20'000, 300'000, kLarge};
  const bool many = seed % 4 == 0;  // More than a lane has chunks and entries.
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      for (uint64_t i = shared() % (many ? 200 : 8); i > 0; --i) {
        const size_t bytes = shared() % limits[shared() % (many ? 2 : 5)];
        plan.push_back({from, to, static_cast<uint32_t>(i), content(bytes, shared())});
      }
    }
  }
  std::shuffle(plan.begin(), plan.end(), own);
  Messages& messages = communicator.messages();
  for (Planned& each : plan) {
    if (each.to == me) {
      each.received.resize(each.sent.size());
      each.message = start_receive(communicator, each.received, each.from, each.tag);
    }
    if (each.from == me) {
      const Started sent = start_send(communicator, each.sent, each.to, each.tag);
      if (each.to != me) each.message = sent;
    }
  }
  std::shuffle(plan.begin(), plan.end(), own);
  for (const Planned& each : plan) {
    if (each.message) CHECK(messages.wait(*each.message));
    if (each.to == me) CHECK(each.received == each.sent);
  }
  Bytes own_rank(1, static_cast<std::byte>(me));
  if (me != 0) return send(communicator, own_rank, 0, kManyTags);
  for (int i = 1; i < ranks; ++i) {
    const int from = receive(communicator, own_rank, kAnyRank, kManyTags);
    CHECK(own_rank[0] == static_cast<std::byte>(from));
  }
}

// Large messages arrive while the ranks do something else, in both directions at once.
void test_progress(Communicator& communicator, const SharedCounter& arrived) {
  const int peer = 1 - communicator.rank();
  Messages& messages = communicator.messages();
  const Bytes sent = content(kLarge, 1);
  Bytes got(kLarge);
  const Started sending = start_send(communicator, sent, peer, 0);
  const Started receiving = start_receive(communicator, got, peer, 0);
  while (!receiving->done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(got == sent);
  arrived.add();
  arrived.wait_for(2);
  CHECK(messages.wait(*sending) && messages.wait(*receiving));
}

void test_sizes(Communicator& communicator) {
  const int me = communicator.rank();
  for (const size_t bytes : {size_t{0}, size_t{8}, kLarge}) {
    Bytes data(me == 0 ? bytes : bytes + 4);
    const auto error = expect<MismatchError>([&] {
      me == 0 ? send(communicator, data, 1, 9) : void(receive(communicator, data, 0, 9));
    });
    const std::string message = error.what();
    CHECK(message.find("rank 0 sends " + std::to_string(bytes) + " bytes with tag 9 to rank 1, " +
                       "which receives " + std::to_string(bytes + 4)) == 0);
    pass_messages(communicator, 5);
  }
}

// What nobody receives or sends ends by the timeout; then the communicator has failed.
void test_timeout(Communicator& communicator, const SharedCounter& failed) {
  Bytes data(kLarge);
  const int me = communicator.rank();
  if (me == 0) {
    const Started message = start_send(communicator, data, 1, 7);
    CHECK(!communicator.messages().wait(*message, Seconds(0.05)));
    const auto error = expect<TimeoutError>([&] { communicator.messages().wait(*message); });
    const std::string says = error.what();
    CHECK(says.find("rank 1 has not received the " + std::to_string(kLarge) +
                    " bytes with tag 7 that rank 0 sends within") == 0);
    failed.add();
    expect<std::runtime_error>([&] { send(communicator, data, 1, 7); });
    expect<std::runtime_error>([&] { barrier(communicator); });
    return;
  }
  failed.wait_for(1);
  const auto begin = Clock::now();
  expect<TimeoutError>([&] { receive(communicator, data, me == 1 ? 0 : kAnyRank, 8); });
  CHECK(Clock::now() - begin < std::chrono::milliseconds(900));  // Rank 0 has told.
}

// A rank that is killed is named within a second; what it sent before arrives.
void test_kill(int seed) {
  const SharedCounter sent;
  const auto body = [&](Communicator& communicator) {
    Bytes data(200'000);
    if (communicator.rank() == 0) {
      const Started message = start_send(communicator, data, 1, 0);
      sent.add();
      std::this_thread::sleep_for(std::chrono::milliseconds(seed % 3));
      raise(SIGKILL);
    }
    sent.wait_for(1);
    const auto begin = Clock::now();
    if (communicator.rank() == 1) receive(communicator, data, 0, 0);
    for (int i = 0; i < 2; ++i) {
      const std::string says =
          expect<PeerError>([&] {
            seed % 2 ? void(receive(communicator, data, seed % 4 == 1 ? kAnyRank : 0, 1))
                     : send(communicator, data, 0, 1);
          }).what();
      CHECK(says.find("rank 0 has died") != says.npos);
    }
    CHECK(Clock::now() - begin < std::chrono::seconds(seed < 100 ? 1 : 10));
  };
  run_processes(3, body, Seconds(30), 0);
}

// Another thread closes the communicator in which this one waits.
void test_close(Communicator& communicator) {
  Bytes data(10);
  if (communicator.rank() == 1) {
    barrier(communicator);
    const auto error = expect<PeerError>([&] { receive(communicator, data, 0, 0); });
    CHECK(std::string(error.what()).find("rank 0 has closed") == 0);
    return;
  }
  std::thread closing([&] {
    barrier(communicator);
    communicator.close();
  });
  expect<std::runtime_error>([&] { receive(communicator, data, 1, 0); });
  closing.join();
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 20;
  const bool delayed = argc > 2;
  if (delayed) fuzz_one_in = std::atoi(argv[2]);
  using Run = std::function<void(int, const RankBody&, Seconds)>;
  const Run runs[] = {
      [](int n, const RankBody& body, Seconds timeout) { run_threads(n, body, timeout); },
      [](int n, const RankBody& body, Seconds timeout) { run_processes(n, body, timeout); }};
  for (const Run& run : runs) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      run(
          ranks,
          [&](Communicator& c) {
            for (int i = 0; i < calls; ++i) pass_messages(c, ranks * 1000 + i);
          },
          Seconds(60));
    }
    const SharedCounter arrived, failed;
    run(2, [&](Communicator& c) { test_progress(c, arrived); }, Seconds(60));
    run(2, test_sizes, Seconds(60));
    run(3, [&](Communicator& c) { test_timeout(c, failed); }, Seconds(1));
    run(2, test_close, Seconds(60));
  }
  for (int seed = 0; seed < calls / 2; ++seed) test_kill(delayed ? 100 + seed : seed);
  return 0;
}
