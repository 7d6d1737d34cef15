// Kernels that each break one rule on machine code, and one that breaks none.
#include <cstdint>

__device__ uint64_t relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ uint64_t acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

extern "C" {

__global__ void right(uint64_t* mine, uint64_t* theirs, const int* in, int* out, uint64_t target) {
  out[1] = in[1];
  store_release(theirs, target);
  while (relaxed(mine) < target) {
  }
  acquire(mine);
  out[0] = in[0];
}

__global__ void non_coherent(const int* in, int* out) {
  out[threadIdx.x] = __ldg(in + threadIdx.x);
}

__global__ void array_in_memory(const int* in, int* out, int begin, int end) {
  int values[64];
  for (int i = 0; i < 64; ++i) values[i] = in[i];
  for (int i = begin; i < end; ++i) out[i] = values[(values[i & 63] + i) & 63];
}

__global__ void no_fence(uint64_t* word, int* out) {
  out[0] = 1;
  store_relaxed(word, 1);
}

__global__ void fence_of_the_device(uint64_t* word, int* out) {
  out[0] = 1;
  __threadfence();
  store_relaxed(word, 1);
}

__global__ void fence_on_one_way(uint64_t* word, int* out, int fenced) {
  out[0] = 1;
  if (fenced) {
    __threadfence_system();
    __nanosleep(100);
  }
  store_relaxed(word, 1);
}

__global__ void fence_before_the_data(uint64_t* word, int* out) {
  __threadfence_system();
  out[0] = 1;
  store_relaxed(word, 1);
}

__global__ void relaxed_exchange(unsigned long long* word, int* out) {
  out[0] = 1;
  out[1] = static_cast<int>(atomicExch(word, 1));
}

__global__ void poll_without_acquire(const uint64_t* word, const int* in, int* out,
                                     uint64_t target) {
  while (relaxed(word) < target) {
  }
  out[0] = in[0];
}

__global__ void volatile_poll(const volatile uint64_t* word, const int* in, int* out) {
  while (*word < 2) {
  }
  out[0] = in[0];
}

}  // extern "C"
