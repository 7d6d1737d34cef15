// Macros for code that is compiled for CUDA kernels and for the CPU.
#pragma once

#ifdef __CUDACC__
#define PK_HOST_DEVICE __host__ __device__
#else
#define PK_HOST_DEVICE
#endif

// Unrolls the following loop fully, so that the arrays it indexes can be kept in registers.
#ifdef __CUDA_ARCH__
#define PK_UNROLL _Pragma("unroll")
#else
#define PK_UNROLL
#endif
