// Python bindings of copies between devices.

#include "pipekernels/p2p_copy/p2p_copy.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "gil.h"
#include "tensor.h"

namespace pipekernels::python {
namespace {

// The view of a tensor that must be on `device`: an index, or kHost.
TensorView view_on(py::handle tensor, int device, const char* name) {
  TensorView view = view_of(tensor);
  const bool fits = device == kHost ? view.device_type == dlpack::kCpu
                                    : view.device_type == dlpack::kCuda && view.device == device;
  if (fits) return view;
  reject(name, device == kHost ? "on the CPU" : "on cuda:" + std::to_string(device),
         "one on " + py::str(tensor.attr("device")).cast<std::string>());
}

void check_alike(const TensorView& view, const TensorView& source, const char* name) {
  if (view.shape == source.shape && view.item_size == source.item_size) return;
  throw std::invalid_argument(std::string(name) + " must have their sources' shapes and dtypes");
}

void check_count(const py::list& tensors, const py::list& sources, const char* name) {
  if (tensors.size() == sources.size()) return;
  reject(name, "as many as the sources, " + std::to_string(sources.size()),
         std::to_string(tensors.size()));
}

bool send(P2PChannel& channel, P2PEvent& event, const py::list& sources, const py::list& targets,
          const py::list& snapshots, uintptr_t stream, int threads) {
  check_count(targets, sources, "targets");
  if (!snapshots.empty()) check_count(snapshots, sources, "snapshots");
  std::vector<TensorCopy> copies;
  std::vector<char*> addresses;
  copies.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    TensorView source = view_on(sources[i], channel.source(), "sources");
    TensorView target = view_on(targets[i], channel.target(), "targets");
    check_alike(target, source, "targets");
    if (!snapshots.empty()) {
      const TensorView snapshot = view_on(snapshots[i], channel.source(), "snapshots");
      check_alike(snapshot, source, "snapshots");
      if (snapshot.strides != target.strides) {
        throw std::invalid_argument("snapshots must have their targets' strides");
      }
      addresses.push_back(snapshot.data);
    }
    copies.push_back({source.data, target.data, source.item_size, std::move(source.shape),
                      std::move(source.strides), std::move(target.strides)});
  }
  const NoGil no_gil;
  return channel.send(event, copies, addresses, address(stream), threads);
}

}  // namespace

void bind_p2p_copy(py::module_& m) {
  using WithoutGil = py::call_guard<NoGil>;

  py::class_<P2PEvent>(m, "P2PEvent")
      .def(py::init<>())
      .def(
          "wait",
          [](const P2PEvent& event, int device, uintptr_t stream) {
            return event.wait(device, address(stream));
          },
          WithoutGil())
      .def("synchronize", &P2PEvent::synchronize, WithoutGil())
      .def("is_done", &P2PEvent::is_done, WithoutGil());

  const auto handle = [](void* stream) { return reinterpret_cast<uintptr_t>(stream); };
  py::class_<P2PChannel>(m, "P2PChannel")
      .def(py::init([](int source, int target, size_t slot_bytes) {
             const NoGil no_gil;  // Not a call_guard: pybind11 registers the object in the call.
             return std::make_unique<P2PChannel>(source, target, slot_bytes);
           }),
           py::arg("source"), py::arg("target"), py::arg("slot_bytes"))
      .def_property_readonly("leaving",
                             [handle](const P2PChannel& e) { return handle(e.leaving()); })
      .def_property_readonly("arriving",
                             [handle](const P2PChannel& e) { return handle(e.arriving()); })
      .def_property_readonly("has_peer_access", &P2PChannel::has_peer_access)
      .def_property_readonly("has_broken_link", &P2PChannel::has_broken_link)
      .def("send", &send)
      .def(
          "mark",
          [](P2PChannel& channel, P2PEvent& event, const std::vector<uintptr_t>& streams) {
            std::vector<void*> handles;
            for (const uintptr_t stream : streams) handles.push_back(address(stream));
            return channel.mark(event, handles);
          },
          WithoutGil());
}

}  // namespace pipekernels::python
