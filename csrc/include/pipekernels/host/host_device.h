// Code that a CUDA kernel and the CPU's compiler both take.
#pragma once

#ifdef __CUDACC__
#define PK_HOST_DEVICE __host__ __device__
#else
#define PK_HOST_DEVICE
#endif

// Before a loop: all its passes one after the other, so that what it indexes can be in registers.
#ifdef __CUDA_ARCH__
#define PK_UNROLL _Pragma("unroll")
#else
#define PK_UNROLL
#endif
