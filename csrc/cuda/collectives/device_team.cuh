// A Team (see block_collective.h) of CUDA threads.
#pragma once

#include <cuda_runtime.h>

#include "pipekernels/collectives/block_collective.h"
#include "pipekernels/collectives/cuda_communicator.h"

namespace pipekernels {

// The functions are __host__ __device__ because their callers are; they are never called on the
// host.
class CudaTeam {
 public:
  PK_HOST_DEVICE explicit CudaTeam(DeviceScratch& shared) : shared_(shared) {}

#ifdef __CUDA_ARCH__
  PK_HOST_DEVICE int thread() const { return threadIdx.x; }
  PK_HOST_DEVICE int block() const { return blockIdx.x; }
#else
  PK_HOST_DEVICE int thread() const { return 0; }
  PK_HOST_DEVICE int block() const { return 0; }
#endif
  PK_HOST_DEVICE int threads() const { return kDeviceThreads; }
  PK_HOST_DEVICE DeviceScratch& shared() const { return shared_; }

  PK_HOST_DEVICE void sync() const {
#ifdef __CUDA_ARCH__
    __syncthreads();
#endif
  }
  PK_HOST_DEVICE bool any(bool value) const {
#ifdef __CUDA_ARCH__
    return __syncthreads_or(value);
#else
    return value;
#endif
  }

  PK_HOST_DEVICE uint64_t load_acquire([[maybe_unused]] const uint64_t* word) const {
    uint64_t value = 0;
#ifdef __CUDA_ARCH__
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
#endif
    return value;
  }
  PK_HOST_DEVICE int32_t load_acquire([[maybe_unused]] const int32_t* word) const {
    int32_t value = 0;
#ifdef __CUDA_ARCH__
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
#endif
    return value;
  }
  PK_HOST_DEVICE uint64_t load_relaxed([[maybe_unused]] const uint64_t* word) const {
    uint64_t value = 0;
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
#endif
    return value;
  }
  PK_HOST_DEVICE int32_t load_relaxed([[maybe_unused]] const int32_t* word) const {
    int32_t value = 0;
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
#endif
    return value;
  }
  PK_HOST_DEVICE void store_release([[maybe_unused]] uint64_t* word,
                                    [[maybe_unused]] uint64_t value) const {
#ifdef __CUDA_ARCH__
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#endif
  }
  PK_HOST_DEVICE void store_relaxed([[maybe_unused]] uint64_t* word,
                                    [[maybe_unused]] uint64_t value) const {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#endif
  }
  PK_HOST_DEVICE uint64_t exchange([[maybe_unused]] uint64_t* word,
                                   [[maybe_unused]] uint64_t value) const {
    uint64_t old = 0;
#ifdef __CUDA_ARCH__
    asm volatile("atom.acq_rel.gpu.global.exch.b64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(word), "l"(value)
                 : "memory");
#endif
    return old;
  }
  PK_HOST_DEVICE void fence() const {
#ifdef __CUDA_ARCH__
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
  }

  PK_HOST_DEVICE uint64_t now() const {
    uint64_t nanoseconds = 0;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
#endif
    return nanoseconds;
  }
  PK_HOST_DEVICE void pause() const {
#ifdef __CUDA_ARCH__
    __nanosleep(100);
#endif
  }

 private:
  DeviceScratch& shared_;
};

}  // namespace pipekernels
