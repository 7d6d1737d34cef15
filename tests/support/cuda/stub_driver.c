// A libcuda.so.1 without a GPU: it checks what Triton's launcher passes to a driver.
//
// The rules are those of the CUDA driver API's reference for cuTensorMapEncodeTiled() and
// cuLaunchKernelEx(), and of the programming guide's table of compute capabilities. A broken one
// makes the call fail; stub_problem() says which. A device's number is its compute capability.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"

#define MAX_PARAMETERS 64
#define EXPORT __attribute__((visibility("default")))

typedef struct {
  int capability, dynamic_shared, count;
  int sizes[MAX_PARAMETERS];  // Of the parameters, in bytes.
} Function;

typedef struct {
  uint64_t begin, end;
} Range;

static Function functions[4096];
static Range memory[4096];
static int function_count, memory_count, launches, maps;
static char problem[512];
static const char kMark[] = "a map that this driver encoded";

#define REQUIRE(condition, ...)                      \
  do {                                               \
    if (!(condition)) {                              \
      snprintf(problem, sizeof problem, __VA_ARGS__); \
      return CUDA_ERROR_INVALID_VALUE;               \
    }                                                \
  } while (0)

// What the tests call: device memory, counts of checked calls, and the last broken rule.
EXPORT void stub_allow(uint64_t address, uint64_t bytes) {
  memory[memory_count++ % 4096] = (Range){address, address + bytes};
}
EXPORT void stub_forget(void) { memory_count = 0; }
EXPORT int stub_launches(void) { return launches; }
EXPORT int stub_maps(void) { return maps; }
EXPORT const char* stub_problem(void) { return problem; }

static int is_allocated(uint64_t begin, uint64_t end) {
  for (int i = 0; i < memory_count && i < 4096; ++i) {
    if (begin >= memory[i].begin && end <= memory[i].end) return 1;
  }
  return 0;
}

static int most_shared(int capability) {
  return (capability == 80 ? 163 : capability == 89 ? 99 : 227) << 10;
}

EXPORT CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  return *context = (CUcontext)functions, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return cuCtxGetCurrent(context);
}
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return *text = problem[0] ? problem : "an error", CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = most_shared(device);
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = most_shared(device) + 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      *value = 65536;
      break;
    default:  // Multiprocessors, and clocks, of which no launch depends.
      *value = 100;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const unsigned char* const elf = image;
  uint64_t sections;
  uint16_t flags, section_bytes, section_count;
  REQUIRE(memcmp(elf, "\177ELF", 4) == 0, "the image is no ELF file");
  memcpy(&sections, elf + 40, sizeof sections);
  memcpy(&flags, elf + 48, sizeof flags);
  memcpy(&section_bytes, elf + 58, sizeof section_bytes);
  memcpy(&section_count, elf + 60, sizeof section_count);
  const unsigned char* const end = elf + sections + section_bytes * section_count;
  REQUIRE(function_count < 4096, "more than 4096 modules");
  Function* const function = &functions[function_count++];
  // Records of a kernel's parameters: 04 17, 12 bytes: index, ordinal and offset, size << 18.
  for (const unsigned char* at = elf; at + 16 <= end; at += 4) {
    if (memcmp(at, "\004\027\014\000", 4) != 0) continue;
    uint16_t ordinal;
    uint32_t size;
    memcpy(&ordinal, at + 8, sizeof ordinal);
    memcpy(&size, at + 12, sizeof size);
    REQUIRE(ordinal < MAX_PARAMETERS, "parameter %d", ordinal);
    function->sizes[ordinal] = size >> 18;
    if (ordinal >= function->count) function->count = ordinal + 1;
  }
  REQUIRE(function->count > 0, "the image describes no parameters");
  *module = (CUmodule)function;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return *function = (CUfunction)module, CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction f) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    REQUIRE(value <= 227 << 10, "%d bytes of dynamic shared memory", value);
    ((Function*)f)->dynamic_shared = value;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr at) {
  REQUIRE(is_allocated(at, at + 1), "%#llx is not in device memory", at);
  memcpy(value, &at, sizeof at);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  REQUIRE((uintptr_t)map % 64 == 0, "a map at %p, which is not aligned to 64 bytes", (void*)map);
  REQUIRE((unsigned)type < sizeof sizes / sizeof *sizes, "type %d", type);
  REQUIRE(rank >= 1 && rank <= 5, "rank %u", rank);
  REQUIRE(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE, "interleave %d", interleave);
  REQUIRE((uintptr_t)address % 16 == 0, "address %p is not aligned to 16 bytes", address);
  const uint64_t size = sizes[type], span[] = {UINT64_MAX, 32, 64, 128};
  REQUIRE((unsigned)swizzle < 4, "swizzle %d", swizzle);
  uint64_t bytes = size;
  for (cuuint32_t i = 0; i < rank; ++i) {
    REQUIRE(dims[i] >= 1 && dims[i] <= 1ull << 32, "size %llu", (unsigned long long)dims[i]);
    REQUIRE(box[i] >= 1 && box[i] <= 256, "a box of %u", box[i]);
    REQUIRE(steps[i] >= 1 && steps[i] <= 8, "an element stride of %u", steps[i]);
    const uint64_t stride = i == 0 ? size : strides[i - 1];
    REQUIRE(i == 0 || (stride % 16 == 0 && stride < 1ull << 40),
            "a stride of %llu bytes", (unsigned long long)stride);
    REQUIRE(i != 1 || dims[1] == 1 || stride >= dims[0] * size, "rows of %llu bytes that overlap",
            (unsigned long long)stride);
    bytes += (dims[i] - 1) * stride;
  }
  const uint64_t width = box[0] * size, begin = (uintptr_t)address;
  REQUIRE(width % 16 == 0, "rows of a box of %llu bytes", (unsigned long long)width);
  REQUIRE(width <= span[swizzle], "rows of a box of %llu bytes, swizzled by %llu",
          (unsigned long long)width, (unsigned long long)span[swizzle]);
  REQUIRE(is_allocated(begin, begin + bytes), "%llu bytes from %p are not all in device memory",
          (unsigned long long)bytes, address);
  REQUIRE(fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
          "NaN as filler of integers");
  memset(map, 0, sizeof *map);
  memcpy((char*)map + 64, kMark, sizeof kMark);  // Triton changes a bit near the start.
  ++maps;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** parameters,
                                 void** extra) {
  const Function* const function = (const Function*)f;
  const uint64_t threads = (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ;
  const int shared = config->sharedMemBytes;
  REQUIRE(config->gridDimX >= 1 && config->gridDimX <= INT32_MAX && config->gridDimY >= 1 &&
              config->gridDimY <= 65535 && config->gridDimZ >= 1 && config->gridDimZ <= 65535,
          "a grid of %u x %u x %u", config->gridDimX, config->gridDimY, config->gridDimZ);
  REQUIRE(threads >= 1 && threads <= 1024, "%llu threads", (unsigned long long)threads);
  REQUIRE(shared <= 48 << 10 || shared <= function->dynamic_shared,
          "%d bytes of shared memory, of which %d are allowed", shared, function->dynamic_shared);
  REQUIRE(extra == NULL, "extra");
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    REQUIRE(config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION ||
                config->gridDimX % config->attrs[i].value.clusterDim.x == 0,
            "a grid of %u in clusters", config->gridDimX);
  }
  for (int i = 0; i < function->count; ++i) {
    REQUIRE(parameters[i] != NULL, "no parameter %d", i);
    if (function->sizes[i] != sizeof(CUtensorMap)) continue;
    REQUIRE((uintptr_t)parameters[i] % 64 == 0, "parameter %d is not aligned to 64 bytes", i);
    REQUIRE(memcmp((char*)parameters[i] + 64, kMark, sizeof kMark) == 0,
            "parameter %d is no encoded map", i);
  }
  ++launches;
  return CUDA_SUCCESS;
}
