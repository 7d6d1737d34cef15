// Python bindings of messages, and of all_to_all, on the CPU.

#include "pipekernels/collectives/messages.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "gil.h"
#include "pipekernels/host/dlpack_tensor.h"
#include "tensor.h"

namespace pipekernels::python {
namespace {

namespace py = pybind11;

// A message and the communicator that it belongs to.
struct Handle {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Message> message;
};

template <bool is_send>
Handle start(std::shared_ptr<Communicator> communicator, void* memory, size_t bytes, int peer,
             int64_t tag) {
  check_in_range("tag", tag, 0, UINT32_MAX);
  const GilUntilRelease gil;
  if (communicator->is_threads() || bytes > kFewBytes) GilUntilRelease::release();
  auto message = communicator->messages().start(is_send, memory, bytes, peer, tag);
  return {std::move(communicator), std::move(message)};
}

template <bool is_send>
Handle start_at(std::shared_ptr<Communicator> communicator, uintptr_t data, size_t bytes, int peer,
                int64_t tag) {
  void* const memory = address_of("data", data, bytes, DType::kUInt8);
  return start<is_send>(std::move(communicator), memory, bytes, peer, tag);
}

// Of a contiguous CPU tensor; nothing if the tensor needs preparation.
template <bool is_send>
std::optional<Handle> start_plain(std::shared_ptr<Communicator> communicator, py::handle tensor,
                                  int peer, int64_t tag) {
  dlpack::Tensor described;
  if (!describe(tensor, described) || described.device_type != dlpack::kCpu) return {};
  const int64_t elements = dlpack::dense_elements(described);
  if (elements < 0 || !holds_elements(tensor, described)) return {};
  const size_t bytes = elements * (described.type_bits * described.type_lanes / 8);
  auto* const data = static_cast<std::byte*>(described.data) + described.offset;
  if (!is_send) mark_changed(tensor);
  return start<is_send>(std::move(communicator), data, bytes, peer, tag);
}

// The parts of all ranks; of a single one that of `root`, of none empty ones.
std::vector<Part> parts_of(const char* name, const std::vector<uintptr_t>& addresses,
                           const std::vector<size_t>& sizes, int ranks, int root) {
  std::vector<Part> parts;
  for (size_t i = 0; i < std::min(addresses.size(), sizes.size()); ++i) {
    parts.push_back({address_of(name, addresses[i], sizes[i], DType::kUInt8), sizes[i]});
  }
  if (parts.size() > 1 || ranks == 1) return parts;
  std::vector<Part> of_all(ranks);
  if (!parts.empty()) of_all[root] = parts[0];
  return of_all;
}

}  // namespace

void bind_messages(py::module_& m, CommunicatorClass& communicator) {
  py::class_<Handle>(m, "Message")
      .def("_source_rank", [](const Handle& handle) { return handle.message->peer.load(); })
      .def_property_readonly("has_ended",
                             [](const Handle& handle) { return handle.message->done.load(); })
      .def("is_done",
           [](const Handle& handle) {
             const NoGil no_gil;
             return handle.communicator->messages().is_done(*handle.message);
           })
      .def(
          "wait",
          [](const Handle& handle, std::optional<double> limit) {
            const GilUntilRelease gil;
            const Message& message = *handle.message;
            if (handle.communicator->is_threads() || message.bytes > kFewBytes) {
              GilUntilRelease::release();
            }
            const auto seconds = limit ? std::optional(Seconds(*limit)) : std::nullopt;
            return handle.communicator->messages().wait(*handle.message, seconds);
          },
          py::arg("limit") = py::none());
  communicator.def("send", &start_at<true>)
      .def("receive", &start_at<false>)
      .def("send_plain", &start_plain<true>)
      .def("receive_plain", &start_plain<false>)
      .def(
          "exchange",
          [](Communicator& self, int call, const std::vector<uintptr_t>& inputs,
             const std::vector<size_t>& input_bytes, const std::vector<uintptr_t>& outputs,
             const std::vector<size_t>& output_bytes, int dtype, int root, size_t count) {
            const int ranks = self.world_size();
            check_in_range("call", call, 0, kCalls - 1);
            check_in_range("root", root, 0, ranks - 1);
            exchange(self,
                     {static_cast<Operation>(call),
                      dtype_of_code(dtype),
                      {},
                      {},
                      static_cast<uint32_t>(root),
                      0,
                      count},
                     parts_of("inputs", inputs, input_bytes, ranks, root),
                     parts_of("outputs", outputs, output_bytes, ranks, root));
          },
          py::call_guard<NoGil>());
}

}  // namespace pipekernels::python
