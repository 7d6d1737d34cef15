// What a transfer copies: contiguous runs of bytes, and strided tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipekernels/micro_batch/micro_batch.h"

namespace pipekernels {

constexpr int64_t kMostItemBytes = 16;

// One tensor of a transfer; strides are in elements. The target is dense: its memory has neither
// holes nor overlaps. The source may have any strides.
struct TensorCopy {
  const char* source;
  char* target;
  int64_t item_size;  // bytes
  std::vector<int64_t> shape, source_strides, target_strides;

  size_t bytes() const;
};

struct Run {
  const char* source;
  char* target;
  size_t bytes;
};

struct Transfer {
  std::vector<Run> runs;            // tensors whose source is laid out as the target
  std::vector<TensorCopy> strided;  // the others; empty tensors are in neither
};

// Throws std::invalid_argument if numbers of dimensions differ, elements have more than
// kMostItemBytes, a size or stride is negative, or a target is not dense.
Transfer plan_transfer(const std::vector<TensorCopy>& tensors);

// Cuts a tensor of a plan into pieces of at most `limit` bytes, but at least one element, each of
// which is contiguous in the target.
std::vector<TensorCopy> pieces_of(const TensorCopy& tensor, size_t limit);

// The tensors as one request for the kernels of micro_batch.h, each as a whole of one microbatch.
MicroBatchCopy as_micro_batches(const std::vector<TensorCopy>& tensors);

// Copies on the CPU with at most `threads` threads.
void copy_on_cpu(const Transfer& transfer, int threads);

}  // namespace pipekernels
