// Splits tensors into microbatches, or concatenates microbatches; all copies in one call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pipekernels/elements/dtype.h"

namespace pipekernels {

// A conversion of elements from the source's dtype to the destination's; both are floating-point.
struct Cast {
  DType from, to;
};

// A tensor to split, or to concatenate into. Strides are in elements; `data` points to element 0.
struct WholeTensor {
  char* data;
  int64_t item_size;  // bytes
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::optional<Cast> cast = {};  // none: elements are copied as bytes
};

// One microbatch of one tensor. Its shape is the whole tensor's, except along the batch dimension.
struct MicroBatch {
  char* data;
  std::vector<int64_t> strides;  // elements
};

enum class Direction { kSplit, kConcat };  // whole -> microbatches, microbatches -> whole

struct MicroBatchCopy {
  Direction direction;
  int64_t dim;                            // the batch dimension, 0 <= dim < number of dimensions
  std::vector<int64_t> sizes;             // size of each microbatch along `dim`
  std::vector<WholeTensor> wholes;        // each has size sum(sizes) along `dim`
  std::vector<MicroBatch> micro_batches;  // [i * wholes.size() + t]: microbatch i of tensor t
};

// Both functions copy tensors of any dtype, and cast as cast.h does. Destinations must not overlap
// each other or a source. Both throw std::invalid_argument if numbers of dimensions, sizes, counts
// or dtypes are inconsistent, or if the elements of a cast are not aligned to their size.

// Copies on the CPU with at most `threads` threads; small copies run on the calling thread alone.
void copy_micro_batches(const MicroBatchCopy& request, int threads);

// Copies on the current CUDA device, or on `device`, in `stream` (a cudaStream_t), and returns
// after the launch. Throws std::runtime_error on a CUDA error.
void copy_micro_batches_cuda(const MicroBatchCopy& request, void* stream);
void copy_micro_batches_cuda(const MicroBatchCopy& request, int device, void* stream);

}  // namespace pipekernels
