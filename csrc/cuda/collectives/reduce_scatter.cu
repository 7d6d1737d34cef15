#include "device_team.cuh"
#include "pipekernels/collectives/reduce_scatter.h"
#include "pipekernels/collectives/reduce_scatter_block.cuh"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {
namespace {

template <Order order, class Type>
__global__ void __launch_bounds__(kDeviceThreads, 1)
    reduce_scatter_kernel(const __grid_constant__ DeviceLaunch launch) {
  __shared__ DeviceScratch scratch;
  CudaTeam team(scratch);
  reduce_scatter_block<order, Type>(team, launch);
}

const void* kernel_for(DType dtype, Order kernel_order) {
  const void* kernel = nullptr;
  with_element_and_order(dtype, kernel_order, [&](auto element, auto order) {
    kernel = reinterpret_cast<const void*>(reduce_scatter_kernel<order, decltype(element)>);
  });
  return kernel;
}

}  // namespace

void add_reduce_scatter_kernels(KernelList& kernels) {
  for (int dtype = 0; dtype < kReducibleDTypes; ++dtype) {
    const auto type = static_cast<DType>(dtype);
    kernels.push_back(kernel_for(type, Order::kRank));
    if (is_floating(type)) kernels.push_back(kernel_for(type, Order::kTree));
  }
}

void reduce_scatter_cuda(CudaCommunicator& communicator, const void* input, void* output,
                         size_t count, DType dtype, Reduction reduction, uint32_t shape,
                         const CudaCaller& caller) {
  check_reducible(dtype, reduction);
  const size_t whole = count * communicator.world_size();
  const Call call{Operation::kReduceScatter, dtype, reduction, {}, 0, shape, whole};
  const uint64_t location = communicator.location_of(input, whole * size_of(dtype), caller.stream);
  communicator.launch(kernel_for(dtype, order_of(reduction, communicator.world_size())),
                      plan_reduce_scatter(communicator.ranks(), call, input, output, location),
                      caller);
}

}  // namespace pipekernels
