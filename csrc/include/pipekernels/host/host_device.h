// Macros for code that is compiled for CUDA kernels and for the CPU.
#pragma once

#ifdef __CUDACC__
#define PK_HOST_DEVICE __host__ __device__
#define PK_FORCE_INLINE __forceinline__
#else
#define PK_HOST_DEVICE
#define PK_FORCE_INLINE
#endif

// PK_UNROLL unrolls the following loop fully, so that the arrays it indexes can be kept in
// registers. PK_ROLLED keeps it as it is: its body has as many loads in flight as there are
// registers for.
#ifdef __CUDA_ARCH__
#define PK_UNROLL _Pragma("unroll")
#define PK_ROLLED _Pragma("unroll 1")
#else
#define PK_UNROLL
#define PK_ROLLED
#endif
