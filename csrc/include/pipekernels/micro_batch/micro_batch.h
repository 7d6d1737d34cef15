// Split tensors into micro-batches, or concatenate micro-batches: all of them in one call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pipekernels/elements/dtype.h"

namespace pipekernels {

// A conversion of elements from the source's dtype to the destination's, both of them floating.
struct Cast {
  DType from, to;
};

// A tensor to split, or to concatenate into. Strides are in elements; `data` is its first element.
struct WholeTensor {
  char* data;
  int64_t item_size;  // bytes
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::optional<Cast> cast = {};  // else bytes are copied, whatever they mean
};

// One micro-batch of one tensor: the whole tensor's shape, but for the size along the batch
// dimension.
struct MicroBatch {
  char* data;
  std::vector<int64_t> strides;  // elements
};

enum class Direction { kSplit, kConcat };  // whole -> micro-batches, micro-batches -> whole

struct MicroBatchCopy {
  Direction direction;
  int64_t dim;                            // the batch dimension, 0 <= dim < number of dimensions
  std::vector<int64_t> sizes;             // of each micro-batch along `dim`
  std::vector<WholeTensor> wholes;        // each has sum(sizes) entries along `dim`
  std::vector<MicroBatch> micro_batches;  // of micro-batch i and tensor t: at i * wholes.size() + t
};

// What is not cast may have any dtype. Elements are cast as cast.h does it. Destinations must not
// overlap each other or a source. Throw std::invalid_argument when ranks, sizes, counts or dtypes
// do not fit together, or the elements of a cast are not aligned to their size.

// On the CPU, with at most `threads` threads; small copies stay on the calling one.
void copy_micro_batches(const MicroBatchCopy& request, int threads);

// On the current CUDA device, ordered on `stream` (a cudaStream_t); returns once launched. Throws
// std::runtime_error on a CUDA error.
void copy_micro_batches_cuda(const MicroBatchCopy& request, void* stream);

}  // namespace pipekernels
