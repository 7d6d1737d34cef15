// The kernels of the all-reduce, which take a DeviceLaunch: a file per algorithm, which compile at
// the same time.
#pragma once

#include "pipekernels/elements/dtype.h"

namespace pipekernels {

const void* one_shot_kernel_for(DType dtype, Order order);
const void* two_shot_kernel_for(DType dtype, Order order);
const void* ring_kernel_for(DType dtype);  // For both orders.

}  // namespace pipekernels
