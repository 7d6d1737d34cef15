#include "all_reduce/kernels.h"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/collectives/all_reduce_launch.cuh"
#include "pipekernels/collectives/cuda_communicator.h"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {
namespace {

const void* kernel_for(DType dtype, Order order, Algorithm algorithm) {
  if (algorithm == Algorithm::kOneShot) return one_shot_kernel_for(dtype, order);
  if (algorithm == Algorithm::kTwoShot) return two_shot_kernel_for(dtype, order);
  return ring_kernel_for(dtype);
}

void reduce(CudaCommunicator& communicator, const Call& call, Algorithm algorithm, void* data,
            const CudaCaller& caller) {
  check_reducible(call.dtype, call.reduction);
  if (communicator.world_size() == 1) return communicator.check();
  const Order order = kernel_order(call, algorithm, communicator.world_size());
  const uint64_t location =
      communicator.location_of(data, call.count * size_of(call.dtype), caller.stream);
  communicator.launch(kernel_for(call.dtype, order, algorithm),
                      plan_all_reduce(communicator.ranks(), call, algorithm, data, location),
                      caller);
}

}  // namespace

void add_all_reduce_kernels(KernelList& kernels) {
  for (int dtype = 0; dtype < kReducibleDTypes; ++dtype) {
    const auto type = static_cast<DType>(dtype);
    for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing}) {
      kernels.push_back(kernel_for(type, Order::kRank, algorithm));
    }
    if (!is_floating(type)) continue;
    for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot}) {
      kernels.push_back(kernel_for(type, Order::kTree, algorithm));
    }
  }
}

void all_reduce_cuda(CudaCommunicator& communicator, void* data, size_t count, DType dtype,
                     Reduction reduction, Algorithm algorithm, uint32_t shape,
                     const CudaCaller& caller) {
  const Call call{Operation::kAllReduce, dtype, reduction, algorithm, 0, shape, count};
  if (algorithm == Algorithm::kAuto) {
    algorithm = choose_device_algorithm(count * size_of(dtype), communicator.world_size());
  }
  reduce(communicator, call, algorithm, data, caller);
}

}  // namespace pipekernels
