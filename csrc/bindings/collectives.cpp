// Python bindings of communicators and of collectives on the CPU.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "gil.h"
#include "pipekernels/collectives/all_gather.h"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/collectives/broadcast.h"
#include "pipekernels/collectives/communicator.h"
#include "pipekernels/collectives/reduce_scatter.h"
#include "pipekernels/host/dlpack.h"
#include "pipekernels/host/dlpack_tensor.h"
#include "pipekernels/shared_memory/process.h"
#include "tensor.h"

namespace pipekernels::python {
namespace {

// The Python exception class for a PeerError, constructed as cls(message, rank). A strong
// reference.
PyObject* peer_error_class = nullptr;

void translate_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError& e) {
    const py::object instance =
        py::reinterpret_borrow<py::object>(peer_error_class)(e.what(), e.rank);
    PyErr_SetObject(peer_error_class, instance.ptr());
  } catch (const TimeoutError& e) {
    PyErr_SetString(PyExc_TimeoutError, e.what());
  }
}

// Sets the Python exception for the current C++ exception, as pybind11 does for its functions.
void set_python_error() {
  try {
    translate_error(std::current_exception());
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

// Lets Ctrl-C end a wait. Python handles signals only in the main thread.
void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;  // glibc before 2.30 has no gettid().
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// The same digest as digest_of() in pipekernels/comm/tensors.py.
uint32_t shape_digest(py::handle tensor, int32_t dims) {
  return dims == 1 ? 0 : static_cast<uint32_t>(py::hash(tensor.attr("shape")) & kMaxShape);
}

// The code whose name is the string object `name`, or -1. Compares pointers to interned strings,
// which Python's string literals are; other strings yield -1 even if they are equal.
template <class Code, int codes>
int code_of(const PyObject* name) {
  static const auto names = [] {
    std::array<PyObject*, codes> interned;
    for (int i = 0; i < codes; ++i) {
      interned[i] = PyUnicode_InternFromString(name_of(static_cast<Code>(i)));
    }
    return interned;
  }();
  int code = codes - 1;
  while (code >= 0 && name != names[code]) --code;
  return code;
}

// Communicator.all_reduce_tensor(tensor, op, algorithm, order) -> bool: the fast path for common
// calls. Does nothing and returns False if `op`, `algorithm` or `order` is not an interned valid
// name, or if the tensor needs preparation: it is not contiguous, is on another device, has no
// memory, or torch cannot describe it to C. Defined without pybind11, whose call overhead is as
// long as a small sum.
PyObject* all_reduce_tensor(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "expected (tensor, op, algorithm, order)");
    return nullptr;
  }
  try {
    const py::handle tensor = arguments[0];
    dlpack::Tensor described;
    if (!describe(tensor, described) || described.device_type != dlpack::kCpu) Py_RETURN_FALSE;
    const int dtype = dtype_of(described);
    const int64_t elements = dense_elements(described);
    if (dtype < 0 || elements < 0 || !holds_elements(tensor, described)) Py_RETURN_FALSE;
    const int operation = code_of<Reduction, kOperations>(arguments[1]);
    const int algorithm = code_of<Algorithm, kAlgorithms>(arguments[2]);
    const int order = code_of<Order, kOrders>(arguments[3]);
    if (operation < 0 || algorithm < 0 || order < 0) Py_RETURN_FALSE;
    const uint32_t shape = shape_digest(tensor, described.dims);
    auto& communicator = py::handle(self).cast<Communicator&>();
    {
      const GilUntilRelease gil;
      // Release the GIL at once if the peers are threads, which need it, or if the call takes long;
      // copying kFewBytes takes some 10 us.
      constexpr int64_t kFewBytes = 256 << 10;
      if (communicator.is_threads() || elements * described.type_bits / 8 > kFewBytes) {
        GilUntilRelease::release();
      }
      all_reduce(communicator, static_cast<std::byte*>(described.data) + described.offset,
                 static_cast<size_t>(elements), static_cast<DType>(dtype),
                 in_order(static_cast<Reduction>(operation), static_cast<Order>(order)),
                 static_cast<Algorithm>(algorithm), shape);
    }
    mark_changed(tensor);
    Py_RETURN_TRUE;
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

}  // namespace

void bind_collectives(py::module_& m) {
  using WithoutGil = py::call_guard<NoGil>;

  peer_error_class = Py_NewRef(PyExc_RuntimeError);
  m.def("set_peer_error", [](const py::type& cls) {
    if (!PyExceptionClass_Check(cls.ptr())) throw py::type_error("expected a class of exceptions");
    Py_DECREF(std::exchange(peer_error_class, cls.inc_ref().ptr()));
  });
  py::register_local_exception_translator(&translate_error);

  m.def("open_pidfd", &open_pidfd);

  py::class_<SymmetricBuffer>(m, "SymmetricBuffer", py::buffer_protocol())
      .def_buffer([](SymmetricBuffer& buffer) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(buffer.data()), buffer.bytes());
      });

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def_static("create", &Segment::create, py::arg("world_size"), py::arg("one_shot_bytes") = 0)
      .def(py::init([](int fd, int world_size) {
             const NoGil no_gil;  // Not a call_guard: pybind11 registers the object in the call.
             return Segment::map(fd, world_size);
           }),
           py::arg("fd"), py::arg("world_size"));

  py::class_<Communicator>(m, "Communicator")
      .def(py::init([](std::shared_ptr<Segment> segment, int rank, std::vector<int> pidfds,
                       double timeout) {
             return std::make_unique<Communicator>(std::move(segment), rank, std::move(pidfds),
                                                   Seconds(timeout), &check_signals,
                                                   &GilUntilRelease::release);
           }),
           py::arg("segment").none(false), py::arg("rank"), py::arg("pidfds"), py::arg("timeout"))
      .def_property_readonly("one_shot_bytes", &Communicator::one_shot_bytes)
      .def("choose_algorithm",
           [](const Communicator& communicator, size_t bytes) {
             return name_of(choose_algorithm(bytes, communicator));
           })
      .def("allocate",
           [](const Communicator& communicator, size_t bytes) {
             return std::make_unique<SymmetricBuffer>(communicator.heap(), bytes);
           })
      .def(
          "all_reduce",
          [](Communicator& communicator, uintptr_t data, size_t count, int dtype, int reduction,
             int algorithm, uint32_t shape) {
            const DType type = dtype_of_code(dtype);
            all_reduce(communicator, address_of("data", data, count, type), count, type,
                       reduction_of_code(reduction), algorithm_of_code(algorithm),
                       checked_shape(shape));
          },
          py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("reduction"),
          py::arg("algorithm"), py::arg("shape") = 0, WithoutGil())
      .def_property_readonly(
          "all_reduce_tensor",
          [](const py::object& self) {
            if (!py::isinstance<Communicator>(self)) throw py::type_error("no Communicator");
            // The method's name differs from the property's: torch.compile would take a function of
            // the property's name for the descriptor that makes methods.
            static PyMethodDef method{
                "Communicator.all_reduce_tensor",
                reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&all_reduce_tensor)),
                METH_FASTCALL, nullptr};
            return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
          })
      .def(
          "reduce_scatter",
          [](Communicator& communicator, uintptr_t input, uintptr_t output, size_t count, int dtype,
             int reduction, uint32_t shape) {
            const DType type = dtype_of_code(dtype);
            const int parts = communicator.world_size();
            reduce_scatter(communicator, address_of("input", input, count, type, parts),
                           address_of("output", output, count, type), count, type,
                           reduction_of_code(reduction), checked_shape(shape));
          },
          py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("reduction"), py::arg("shape") = 0, WithoutGil())
      .def(
          "all_gather",
          [](Communicator& communicator, uintptr_t input, uintptr_t output, size_t count, int dtype,
             uint32_t shape) {
            const DType type = dtype_of_code(dtype);
            const int parts = communicator.world_size();
            all_gather(communicator, address_of("input", input, count, type),
                       address_of("output", output, count, type, parts), count, type,
                       checked_shape(shape));
          },
          py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("shape") = 0, WithoutGil())
      .def(
          "broadcast",
          [](Communicator& communicator, uintptr_t data, size_t count, int dtype, int root,
             uint32_t shape) {
            const DType type = dtype_of_code(dtype);
            broadcast(communicator, address_of("data", data, count, type), count, type, root,
                      checked_shape(shape));
          },
          py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("root"),
          py::arg("shape") = 0, WithoutGil())
      .def("barrier", &barrier, WithoutGil())
      .def("close", &Communicator::close, WithoutGil())
      .def("abort", &Communicator::abort, WithoutGil());
}

}  // namespace pipekernels::python
