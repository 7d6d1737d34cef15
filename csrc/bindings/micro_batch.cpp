// Python bindings of copies of microbatches.

#include "pipekernels/micro_batch/micro_batch.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
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
#include "torch_shim.h"

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

// The request for tensors that must all be on one device of `device_type`, whose index becomes
// `device`. If the dtypes of a tensor and its microbatches differ, elements are cast.
MicroBatchCopy micro_batch_copy(bool split, int64_t dim, const py::list& wholes,
                                const py::list& micro_batches, dlpack::DeviceType device_type,
                                int& device) {
  MicroBatchCopy request;
  request.direction = split ? Direction::kSplit : Direction::kConcat;
  request.dim = dim;
  std::vector<Kinds> kinds;  // of each whole tensor and its microbatches
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

// A split into contiguous microbatches that torch allocates.
class NewSplit {
 public:
  // Without effect, and false, for what torch's C interface or its older versions do not make, for
  // tensors that do not fit, and where torch finds no memory: torch's Python functions take these,
  // or raise the error. `dtype` is a c10::ScalarType to cast to, or -1.
  bool read(const py::list& tensors, const Integers& sizes, int64_t dim, int32_t dtype) {
    const auto* const to = torch_shim::type_of(dtype);
    if (!torch_shim::is_found || tensors.empty() || (dtype >= 0 && (!to || !is_castable(*to)))) {
      return false;
    }
    request_ = {Direction::kSplit, dim, sizes, {}, {}};
    const int64_t batch = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    for (const py::handle tensor : tensors) {
      dlpack::Tensor whole;
      if (!describe(tensor, whole) || dim < 0 || dim >= whole.dims || whole.shape[dim] != batch) {
        return false;
      }
      if (made_.empty()) device_type_ = whole.device_type, device_ = whole.device;
      const auto* const from = torch_shim::type_of(whole);
      if (from == nullptr || whole.device_type != device_type_ || whole.device != device_) {
        return false;
      }
      const bool casts = to != nullptr && is_castable(*from) && from != to;
      request_.wholes.push_back({static_cast<char*>(whole.data) + whole.offset, from->bits / 8,
                                 Integers(whole.shape, whole.shape + whole.dims),
                                 Integers(whole.strides, whole.strides + whole.dims)});
      if (casts) request_.wholes.back().cast = {cast_code(*from), cast_code(*to)};
      made_.push_back(casts ? to->dtype : from->dtype);
    }
    return true;
  }

  // Without the GIL: an allocation may wait for kernels that other threads have yet to launch.
  bool allocate() {
    for (const int64_t size : request_.sizes) {
      for (size_t t = 0; t < request_.wholes.size(); ++t) {
        Integers shape = request_.wholes[t].shape, strides(shape.size(), 1);
        shape[request_.dim] = size;
        for (size_t d = shape.size() - 1; d > 0; --d) {
          strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
        }
        torch_shim::Tensor part;
        const void* data;
        if (torch_shim::aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(),
                                                 made_[t], device_type_ - dlpack::kCpu, device_,
                                                 &part) != 0) {
          return false;
        }
        parts_.emplace_back(part);
        if (torch_shim::torch_get_const_data_ptr(part, &data) != 0) return false;
        request_.micro_batches.push_back(
            {static_cast<char*>(const_cast<void*>(data)), std::move(strides)});
      }
    }
    return true;
  }

  bool is_on_cpu() const { return device_type_ == dlpack::kCpu; }
  int device() const { return device_; }
  const MicroBatchCopy& request() const { return request_; }

  // Capsules of references to the microbatches, for Python to own.
  py::list release() {
    py::list capsules;
    for (auto& part : parts_) capsules.append(py::cast(static_cast<void*>(part.release())));
    return capsules;
  }

 private:
  static DType cast_code(const torch_shim::Type& type) {
    dlpack::Tensor described{};
    described.type_code = type.code;
    described.type_bits = type.bits;
    described.type_lanes = 1;
    return static_cast<DType>(dtype_of(described));
  }
  static bool is_castable(const torch_shim::Type& type) {
    return type.code == dlpack::kFloat || type.code == dlpack::kBfloat;
  }

  MicroBatchCopy request_;
  int32_t device_type_ = 0, device_ = 0;
  std::vector<int32_t> made_;  // the c10::ScalarType of each tensor's microbatches
  std::vector<torch_shim::OwnedTensor> parts_;
};

// Capsules of the new microbatches of `tensors`, or None, see NewSplit::read(). `by` is the number
// of threads on the CPU, and the stream on a CUDA device.
py::object split_micro_batches(const py::list& tensors, const Integers& sizes, int64_t dim,
                               int32_t dtype, uintptr_t by) {
  NewSplit split;
  if (!split.read(tensors, sizes, dim, dtype)) return py::none();
  if (split.is_on_cpu()) check_in_range("threads", static_cast<int64_t>(by), 1, kMaxThreads);
  const auto run = [&] {
    if (!split.allocate()) return false;
    if (split.is_on_cpu()) {
      copy_micro_batches(split.request(), static_cast<int>(by));
      return true;
    }
#ifdef PIPEKERNELS_WITH_CUDA
    copy_micro_batches_cuda(split.request(), split.device(), address(by));
    return true;
#else
    return false;
#endif
  };
  std::optional<NoGil> no_gil(std::in_place);
  const bool done = run();
  no_gil.reset();
  if (!done) return py::none();
  return split.release();
}

}  // namespace

void bind_micro_batches(py::module_& m) {
  m.def("are_plain", &are_plain);
  m.def("are_plain_and_fit", &are_plain_and_fit);
  m.def("split_micro_batches", &split_micro_batches);
  m.def(
      "copy_micro_batches",
      [](bool split, int64_t dim, const py::list& wholes, const py::list& micro_batches,
         int threads) {
        check_in_range("threads", threads, 1, kMaxThreads);
        int device = 0;
        const auto request =
            micro_batch_copy(split, dim, wholes, micro_batches, dlpack::kCpu, device);
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
        int device = 0;
        const auto request =
            micro_batch_copy(split, dim, wholes, micro_batches, dlpack::kCuda, device);
        const NoGil no_gil;
        copy_micro_batches_cuda(request, device, address(stream));
      },
      py::arg("split"), py::arg("dim"), py::arg("wholes"), py::arg("micro_batches"),
      py::arg("stream"));
#endif
}

}  // namespace pipekernels::python
