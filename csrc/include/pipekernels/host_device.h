// Code that a CUDA kernel and the CPU's compiler both take.
#pragma once

#ifdef __CUDACC__
#define PK_HOST_DEVICE __host__ __device__
#define PK_UNROLL _Pragma("unroll")
#else
#define PK_HOST_DEVICE
#define PK_UNROLL
#endif
