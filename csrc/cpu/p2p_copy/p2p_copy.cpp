// The part of transfers that needs no CUDA: their plan, and copies on the CPU.
#include "pipekernels/p2p_copy/p2p_copy.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pipekernels {
namespace {

// The dimensions of more than one element, outermost first in the target.
std::vector<size_t> dimensions_of(const TensorCopy& tensor) {
  std::vector<size_t> dims;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    if (tensor.shape[d] != 1) dims.push_back(d);
  }
  std::sort(dims.begin(), dims.end(), [&](size_t a, size_t b) {
    return tensor.target_strides[a] > tensor.target_strides[b];
  });
  return dims;
}

[[noreturn]] void reject(size_t position, const std::string& why) {
  throw std::invalid_argument("tensor " + std::to_string(position) + " to copy " + why);
}

void validate(const TensorCopy& tensor, size_t position) {
  const size_t dims = tensor.shape.size();
  if (tensor.source_strides.size() != dims || tensor.target_strides.size() != dims) {
    reject(position, "has " + std::to_string(dims) + " dimensions, its source has " +
                         std::to_string(tensor.source_strides.size()) + " and its target " +
                         std::to_string(tensor.target_strides.size()));
  }
  if (tensor.item_size < 1 || tensor.item_size > kMostItemBytes) {
    reject(position, "has elements of " + std::to_string(tensor.item_size) +
                         " bytes, which must be 1 to " + std::to_string(kMostItemBytes));
  }
  for (size_t d = 0; d < dims; ++d) {
    if (tensor.shape[d] < 0 || tensor.source_strides[d] < 0) {
      reject(position, "has a negative size or stride");
    }
  }
}

bool is_empty(const TensorCopy& tensor) {
  return std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
}

}  // namespace

size_t TensorCopy::bytes() const {
  return std::accumulate(shape.begin(), shape.end(), item_size, std::multiplies<>());
}

Transfer plan_transfer(const std::vector<TensorCopy>& tensors) {
  Transfer result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorCopy& tensor = tensors[i];
    validate(tensor, i);
    if (is_empty(tensor)) continue;
    const std::vector<size_t> dims = dimensions_of(tensor);
    int64_t elements = 1;
    bool same = true;
    for (auto d = dims.rbegin(); d != dims.rend(); ++d) {
      if (tensor.target_strides[*d] != elements) reject(i, "has a target that is not dense");
      same = same && tensor.source_strides[*d] == elements;
      if (__builtin_mul_overflow(elements, tensor.shape[*d], &elements)) reject(i, "is too large");
    }
    if (same) {
      result.runs.push_back({tensor.source, tensor.target, tensor.bytes()});
    } else {
      result.strided.push_back(tensor);
    }
  }
  return result;
}

std::vector<TensorCopy> pieces_of(const TensorCopy& tensor, size_t limit) {
  if (tensor.bytes() <= limit) return {tensor};
  const std::vector<size_t> dims = dimensions_of(tensor);
  if (dims.empty()) return {tensor};
  const size_t outer = dims.front();
  const int64_t size = tensor.shape[outer];
  const size_t row = tensor.bytes() / size;
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(limit / row));
  std::vector<TensorCopy> result;
  for (int64_t begin = 0; begin < size; begin += step) {
    TensorCopy part = tensor;
    part.shape[outer] = std::min(step, size - begin);
    part.source += begin * tensor.source_strides[outer] * tensor.item_size;
    part.target += begin * tensor.target_strides[outer] * tensor.item_size;
    for (TensorCopy& piece : pieces_of(part, limit)) result.push_back(std::move(piece));
  }
  return result;
}

MicroBatchCopy as_micro_batches(const std::vector<TensorCopy>& tensors) {
  MicroBatchCopy request{Direction::kSplit, 0, {1}, {}, {}};
  const auto with_first = [](int64_t first, const std::vector<int64_t>& rest) {
    std::vector<int64_t> all{first};
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
  };
  for (const TensorCopy& tensor : tensors) {
    request.wholes.push_back({const_cast<char*>(tensor.source), tensor.item_size,
                              with_first(1, tensor.shape), with_first(0, tensor.source_strides)});
    request.micro_batches.push_back({tensor.target, with_first(0, tensor.target_strides)});
  }
  return request;
}

void copy_on_cpu(const Transfer& transfer, int threads) {
  std::vector<TensorCopy> all = transfer.strided;
  for (const Run& run : transfer.runs) {
    all.push_back({run.source, run.target, 1, {static_cast<int64_t>(run.bytes)}, {1}, {1}});
  }
  copy_micro_batches(as_micro_batches(all), threads);
}

}  // namespace pipekernels
