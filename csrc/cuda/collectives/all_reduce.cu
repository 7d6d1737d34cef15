#include "device_team.cuh"
#include "pipekernels/collectives/all_reduce.cuh"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {
namespace {

template <Algorithm algorithm, class Type>
__global__ void __launch_bounds__(kDeviceThreads, 1)
    all_reduce_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  all_reduce_block<algorithm, Type>(team, launch);
}

const void* kernel_for(DType dtype, Algorithm algorithm) {
  const void* kernel = nullptr;
  with_element(dtype, [&](auto element) {
    using Type = decltype(element);
    if (algorithm == Algorithm::kOneShot) {
      kernel = reinterpret_cast<const void*>(all_reduce_kernel<Algorithm::kOneShot, Type>);
    } else if (algorithm == Algorithm::kTwoShot) {
      kernel = reinterpret_cast<const void*>(all_reduce_kernel<Algorithm::kTwoShot, Type>);
    } else {
      kernel = reinterpret_cast<const void*>(all_reduce_kernel<Algorithm::kRing, Type>);
    }
  });
  return kernel;
}

void reduce(CudaCommunicator& communicator, const Call& call, Algorithm algorithm, void* data,
            const Gates& gates, const CudaCaller& caller) {
  check_reducible(call.dtype, call.reduction);
  if (communicator.world_size() == 1 && gates.ready == nullptr) return communicator.check();
  algorithm = device_kernel_for(call, algorithm);
  const uint64_t location = communicator.location_of(data, call.count * size_of(call.dtype));
  communicator.launch(kernel_for(call.dtype, algorithm),
                      plan_all_reduce(communicator.ranks(), call, algorithm, data, location, gates),
                      caller);
}

}  // namespace

void add_all_reduce_kernels(KernelList& kernels) {
  for (int dtype = 0; dtype < kReducibleDTypes; ++dtype) {
    for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing}) {
      kernels.push_back(kernel_for(static_cast<DType>(dtype), algorithm));
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
  reduce(communicator, call, algorithm, data, {}, caller);
}

void all_reduce_when_ready_cuda(CudaCommunicator& communicator, void* data, size_t count,
                                DType dtype, Reduction reduction, const Gates& gates, int blocks,
                                uint32_t shape, const CudaCaller& caller) {
  const int most = communicator.ranks().layout.blocks;
  const auto few = static_cast<uint32_t>(blocks < most ? blocks : most);
  const Call call{
      Operation::kAllReduceWhenReady, dtype, reduction, Algorithm::kTwoShot, few, shape, count};
  reduce(communicator, call, Algorithm::kTwoShot, data, gates, caller);
}

}  // namespace pipekernels
