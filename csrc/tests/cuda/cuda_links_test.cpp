// What CUDA communicators find out about the links between their devices, on the fake CUDA runtime.

#include "cuda_rank.h"

namespace pipekernels {
namespace {

// Rank 1 does not get what rank 0 writes to its memory; all ranks know.
void find_a_broken_link(Communicator& core) {
  {
    CudaCommunicator cuda(core, 0, kHeap);
    CHECK(cuda.broken_links() == "ranks 0 and 1");
    barrier(core);
    if (core.rank() == 0) fake_cuda::deliver_late_writes();
    barrier(core);
    cuda.close(false);
  }
  barrier(core);
  if (core.rank() == 0 || !core.is_threads()) fake_cuda::fault = {};
  barrier(core);
  Rank rank(core);
  CHECK(rank.cuda.broken_links().empty());
  std::vector<float> data(20'000, rank.number() + 1.0f);
  rank.all_reduce(data.data(), data.size());
  rank.cuda.synchronize();
  CHECK(all_are(data.data(), data.size(), rank.sum()));
}

void look_for_nvlink(Communicator& core) {
  fake_cuda::own_gpu = static_cast<char>(core.rank() / 2);  // Two ranks share one.
  fake_cuda::nvlink = core.rank() != 1;  // One rank's driver says that there is none.
  const CudaCommunicator cuda(core, 0, kHeap);
  CHECK(cuda.has_slow_links() == (core.world_size() > 4));
}

}  // namespace
}  // namespace pipekernels

int main() {
  using namespace pipekernels;
  using fake_cuda::Fault;
  // Processes first, since a process with threads must not fork.
  for (const auto kind : {Fault::kDropped, Fault::kLate, Fault::kCorrupt}) {
    fake_cuda::fault = {kind, 0, 1};
    run_processes(3, find_a_broken_link);
  }
  fake_cuda::fault = {};
  for (const int n : {4, 5}) run_processes(n, look_for_nvlink);
  fake_cuda::fault = {Fault::kDropped, 1, 0};
  run_threads(2, find_a_broken_link);
}
