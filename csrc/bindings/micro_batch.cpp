// Python bindings of copies of microbatches.

#include "pipekernels/micro_batch/micro_batch.h"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "gil.h"
#include "pipekernels/host/dlpack.h"
#include "pipekernels/host/dlpack_tensor.h"
#include "tensor.h"

namespace pipekernels::python {
namespace {

// More threads than Linux supports processors. Limited because OpenMP ends the process if it cannot
// start a thread.
constexpr int kMaxThreads = 8192;

// Identifies a dtype as far as needed here. All dtypes that cannot be cast have the code -1.
struct ElementKind {
  int dtype;
  int64_t item_size;

  bool operator!=(const ElementKind& other) const {
    return dtype != other.dtype || item_size != other.item_size;
  }
};

struct Kinds {
  ElementKind whole;
  ElementKind part = {};  // of the first microbatch
};

Cast cast(const ElementKind& from, const ElementKind& to) {
  if (from.dtype < 0 || to.dtype < 0) {
    throw std::invalid_argument(
        "a tensor and its microbatches may differ in dtype only if both are float64, float32, "
        "float16 or bfloat16");
  }
  return {static_cast<DType>(from.dtype), static_cast<DType>(to.dtype)};
}

// Throws std::invalid_argument unless `part` has the whole tensor's shape except along `dim`.
void check_shape(const Integers& part, const Integers& whole, int64_t dim, size_t micro_batch) {
  bool fits = part.size() == whole.size();
  for (size_t d = 0; fits && d < whole.size(); ++d) {
    fits = part[d] == whole[d] || static_cast<int64_t>(d) == dim;
  }
  if (fits) return;
  const auto text = [](const Integers& shape) {
    return py::str(py::tuple(py::cast(shape))).cast<std::string>();
  };
  throw std::invalid_argument("a tensor of microbatch " + std::to_string(micro_batch) +
                              " has shape " + text(part) + ", which must be that of its whole, " +
                              text(whole) + ", except along dimension " + std::to_string(dim));
}

// The request for tensors that must all be on one device of `device_type`. If the dtypes of a
// tensor and its microbatches differ, elements are cast.
MicroBatchCopy micro_batch_copy(bool split, int64_t dim, const py::list& wholes,
                                const py::list& micro_batches, dlpack::DeviceType device_type) {
  MicroBatchCopy request;
  request.direction = split ? Direction::kSplit : Direction::kConcat;
  request.dim = dim;
  std::vector<Kinds> kinds;  // of each whole tensor and its microbatches
  int device = 0;            // of the first tensor
  const auto checked_view = [&](py::handle tensor) {
    TensorView view = view_of(tensor);
    if (kinds.empty()) device = view.device;
    if (view.device_type != device_type || view.device != device) {
      throw std::invalid_argument(
          std::string("all tensors must be on one ") +
          (device_type == dlpack::kCuda ? "CUDA device" : "device, the CPU") + ", got one on " +
          py::str(tensor.attr("device")).cast<std::string>());
    }
    return view;
  };
  for (const py::handle tensor : wholes) {
    TensorView view = checked_view(tensor);
    check_in_range("dim", dim, 0, static_cast<int64_t>(view.shape.size()) - 1);
    request.wholes.push_back(
        {view.data, view.item_size, std::move(view.shape), std::move(view.strides)});
    kinds.push_back({{view.dtype, view.item_size}});
  }
  if (request.wholes.empty()) throw std::invalid_argument("there are 0 tensors; give at least one");
  size_t t = 0;  // The index of `tensor` in its microbatch.
  for (const py::handle tensor : micro_batches) {
    TensorView view = checked_view(tensor);
    WholeTensor& whole = request.wholes[t];
    check_shape(view.shape, whole.shape, dim, request.sizes.size() - (t != 0));
    const int64_t size = view.shape[dim];
    if (t == 0) request.sizes.push_back(size);
    const ElementKind kind{view.dtype, view.item_size};
    auto& [whole_kind, part_kind] = kinds[t];
    if (request.sizes.size() == 1) {
      part_kind = kind;
      if (kind != whole_kind) whole.cast = split ? cast(whole_kind, kind) : cast(kind, whole_kind);
    }
    if (kind != part_kind) {
      throw std::invalid_argument("microbatch " + std::to_string(request.sizes.size() - 1) +
                                  " differs in dtype from the first one");
    }
    if (size != request.sizes.back()) {
      throw std::invalid_argument("the tensors of microbatch " +
                                  std::to_string(request.sizes.size() - 1) +
                                  " differ in their size along dimension " + std::to_string(dim));
    }
    request.micro_batches.push_back({view.data, std::move(view.strides)});
    if (++t == request.wholes.size()) t = 0;
  }
  return request;
}

// Whether kernels can use the tensor's memory directly: it is on the CPU or a CUDA device, and
// holds the elements themselves.
bool is_plain(py::handle tensor, const dlpack::Tensor& described) {
  using namespace dlpack;
  return (described.device_type == kCpu || described.device_type == kCuda) &&
         holds_elements(tensor, described);
}

bool are_plain(const py::list& tensors) {
  for (const py::handle tensor : tensors) {
    dlpack::Tensor described;
    if (!describe(tensor, described) || !is_plain(tensor, described)) return false;
  }
  return true;
}

// Whether all tensors are plain, on one device, and can be concatenated along `dim`. Each
// microbatch consists of `tensors` consecutive entries of `micro_batches`.
bool are_plain_and_fit(int64_t dim, int64_t tensors, const py::list& micro_batches) {
  using dlpack::Tensor;
  check_in_range("dim", dim, 0, std::numeric_limits<int64_t>::max());
  if (micro_batches.empty()) return true;
  check_in_range("tensors", tensors, 1, static_cast<int64_t>(micro_batches.size()));
  std::vector<Tensor> first(tensors);  // the first microbatch
  int64_t size = 0;                    // of the current microbatch, along `dim`
  int64_t t = 0;                       // the index of `tensor` in its microbatch
  for (int64_t i = 0; i < static_cast<int64_t>(micro_batches.size()); ++i) {
    const py::handle tensor = micro_batches[i];
    Tensor given;
    if (!describe(tensor, given) || dim >= given.dims) return false;
    if (i < tensors) first[t] = given;
    if (given.device_type != first[0].device_type || given.device != first[0].device) {
      return false;
    }
    if (t == 0) size = given.shape[dim];
    if (given.shape[dim] != size || !same_but_for_size_along(dim, first[t], given)) return false;
    if (!is_plain(tensor, given)) return false;
    if (++t == tensors) t = 0;
  }
  return true;
}

}  // namespace

void bind_micro_batches(py::module_& m) {
  m.def("are_plain", &are_plain);
  m.def("are_plain_and_fit", &are_plain_and_fit);
  m.def(
      "copy_micro_batches",
      [](bool split, int64_t dim, const py::list& wholes, const py::list& micro_batches,
         int threads) {
        check_in_range("threads", threads, 1, kMaxThreads);
        const auto request = micro_batch_copy(split, dim, wholes, micro_batches, dlpack::kCpu);
        const NoGil no_gil;
        copy_micro_batches(request, threads);
      },
      py::arg("split"), py::arg("dim"), py::arg("wholes"), py::arg("micro_batches"),
      py::arg("threads"));
#ifdef PIPEKERNELS_WITH_CUDA
  m.def(
      "copy_micro_batches_cuda",
      [](bool split, int64_t dim, const py::list& wholes, const py::list& micro_batches,
         uintptr_t stream) {
        const auto request = micro_batch_copy(split, dim, wholes, micro_batches, dlpack::kCuda);
        const NoGil no_gil;
        copy_micro_batches_cuda(request, address(stream));
      },
      py::arg("split"), py::arg("dim"), py::arg("wholes"), py::arg("micro_batches"),
      py::arg("stream"));
#endif
}

}  // namespace pipekernels::python
