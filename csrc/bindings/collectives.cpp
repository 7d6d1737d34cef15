// Python bindings of communicators and of collectives on the CPU.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "capsule.h"
#include "gil.h"
#include "pipekernels/collectives/all_gather.h"
#include "pipekernels/collectives/all_reduce.h"
#include "pipekernels/collectives/broadcast.h"
#include "pipekernels/collectives/communicator.h"
#include "pipekernels/collectives/reduce_scatter.h"
#include "pipekernels/elements/reduce.h"
#include "pipekernels/host/dlpack.h"
#include "pipekernels/host/dlpack_tensor.h"
#include "pipekernels/shared_memory/process.h"
#include "tensor.h"
#include "torch_shim.h"

namespace pipekernels::python {
namespace {

// A strong reference to the Python class for a PeerError, constructed as cls(message, rank).
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

// The communicators by the handles that operators name them by. The GIL guards them.
std::unordered_map<int64_t, std::weak_ptr<Communicator>> communicators;

void close(Communicator& communicator) {
  for (auto entry = communicators.begin(); entry != communicators.end();) {
    const auto named = entry->second.lock();
    entry = named && named.get() != &communicator ? std::next(entry) : communicators.erase(entry);
  }
  const NoGil no_gil;
  communicator.close();
}

}  // namespace

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

std::shared_ptr<Communicator> communicator_of(int64_t handle) {
  const auto found = communicators.find(handle);
  return found == communicators.end() ? nullptr : found->second.lock();
}

namespace {

// Lets Ctrl-C end a wait. Python handles signals only in the main thread.
void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;  // glibc before 2.30 has no gettid().
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// How many threads copy and add for one of `ranks` processes: those of torch's operations in the
// main thread, but as a share of its cores: with threads that wait for a core, calls take far
// longer.
int intra_op_threads(int ranks) {
  uint32_t threads = 1;
  cpu_set_t cores;
  if (!torch_shim::is_found || syscall(SYS_gettid) != getpid()) return 1;
  if (torch_shim::torch_get_num_threads(&threads) != 0) return 1;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::clamp(CPU_COUNT(&cores) / ranks, 1, std::max(1, static_cast<int>(threads)));
}

// The first call of a rank that is a thread. A thread that is alone in its process would wait for
// peers that cannot come.
void check_not_alone(int rank) {
  py::gil_scoped_acquire gil;
  const auto threading = py::module_::import("threading");
  if (threading.attr("active_count")().cast<int>() > 1) return;
  const auto name = threading.attr("current_thread")().attr("name").cast<std::string>();
  throw std::runtime_error(std::string(kRuleForThreads) + "; this is " + rank_name(rank) +
                           ", called by thread " + name + ", the only one of this process");
}

// The names of the first `codes` values of an enumeration, in the order of their codes.
template <class Code>
py::tuple names_of(int codes) {
  py::tuple names(codes);
  for (int i = 0; i < codes; ++i) names[i] = name_of(static_cast<Code>(i));
  return names;
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

// A contiguous CPU tensor of a dtype that can be reduced there, as native calls take it.
struct PlainTensor {
  std::byte* data;
  size_t count;  // Elements.
  DType dtype;
  int32_t dims;

  size_t bytes() const { return count * size_of(dtype); }
  bool overlaps(const PlainTensor& other) const {
    return data < other.data + other.bytes() && other.data < data + bytes();
  }
};

// Nothing if the tensor needs preparation: it is not contiguous, is on another device, has no
// memory, or torch cannot describe it to C.
std::optional<PlainTensor> as_plain(py::handle tensor) {
  dlpack::Tensor described;
  if (!describe(tensor, described) || described.device_type != dlpack::kCpu) return {};
  const int dtype = cpu_dtype_of(described);
  const int64_t elements = dense_elements(described);
  if (dtype < 0 || elements < 0 || !holds_elements(tensor, described)) return {};
  return PlainTensor{static_cast<std::byte*>(described.data) + described.offset,
                     static_cast<size_t>(elements), static_cast<DType>(dtype), described.dims};
}

// Runs call(communicator), which moves `bytes`, with the GIL released where that pays, and returns
// true. If the caller does not wait, only a short call of peers that have come: else returns false.
template <class Body>
bool run_without_gil_if_long(Communicator& communicator, size_t bytes, bool waits, Body call) {
  const GilUntilRelease gil;
  // Release the GIL at once if the peers are threads, which need it, or if the call takes long.
  if (!waits && (bytes > kFewBytes || !communicator.meets_peers())) return false;
  if (communicator.is_threads() || bytes > kFewBytes) GilUntilRelease::release();
  call();
  return true;
}

// The methods below are the fast paths for common calls. They do nothing and return False for
// tensors that need preparation, and where a name is not an interned valid one. Defined without
// pybind11, whose call overhead is as long as a small sum.
// all_reduce_tensor(tensor, op, algorithm, order) -> bool
bool all_reduce_tensor(Communicator& communicator, PyObject* const* arguments) {
  const py::handle tensor = arguments[0];
  const auto plain = as_plain(tensor);
  const int operation = code_of<Reduction, kOperations>(arguments[1]);
  const int algorithm = code_of<Algorithm, kAlgorithms>(arguments[2]);
  const int order = code_of<Order, kOrders>(arguments[3]);
  if (!plain || !is_reducible(plain->dtype) || operation < 0 || algorithm < 0 || order < 0) {
    return false;
  }
  const uint32_t shape = plain->dims == 1 ? 0 : shape_digest(tensor.attr("shape"));
  run_without_gil_if_long(communicator, plain->bytes(), true, [&] {
    all_reduce(communicator, plain->data, plain->count, plain->dtype,
               in_order(static_cast<Reduction>(operation), static_cast<Order>(order)),
               static_cast<Algorithm>(algorithm), shape);
  });
  mark_changed(tensor);
  return true;
}

bool can_gather(const Communicator& communicator, const std::optional<PlainTensor>& input,
                const std::optional<PlainTensor>& output) {
  return input && output && input->dtype == output->dtype &&
         output->count == input->count * communicator.world_size() &&
         (!input->overlaps(*output) ||
          input->data == output->data + communicator.rank() * input->bytes());
}

// all_gather_tensor(input, output) -> bool
bool all_gather_tensor(Communicator& communicator, PyObject* const* arguments) {
  const auto input = as_plain(arguments[0]), output = as_plain(arguments[1]);
  dlpack::Tensor from, to;
  if (!can_gather(communicator, input, output) || input->dims == 0 ||
      !describe(arguments[0], from) || !describe(arguments[1], to) ||
      !dlpack::same_but_for_size_along(0, from, to)) {
    return false;
  }
  const py::handle tensor = arguments[0];
  const uint32_t shape = input->dims == 1 ? 0 : shape_digest(tensor.attr("shape"));
  run_without_gil_if_long(communicator, output->bytes(), true, [&] {
    all_gather(communicator, input->data, output->data, input->count, input->dtype, shape);
  });
  mark_changed(arguments[1]);
  return true;
}

// Those of torch.distributed, which compares numbers of elements, not shapes: as tensors of one
// dimension. The last argument says whether the caller waits; see run_without_gil_if_long().
bool waits(py::handle argument) { return argument.ptr() == Py_True; }

bool has_reduction(DType dtype, int reduction) {
  return reduction >= 0 && has_reduce_kernels(dtype, static_cast<Reduction>(reduction));
}

// all_reduce_flat(tensor, op, waits) -> bool
bool all_reduce_flat(Communicator& communicator, PyObject* const* arguments) {
  const auto plain = as_plain(arguments[0]);
  const int reduction = code_of<Reduction, kReductions>(arguments[1]);
  if (!plain || !has_reduction(plain->dtype, reduction)) return false;
  const bool made = run_without_gil_if_long(communicator, plain->bytes(), waits(arguments[2]), [&] {
    all_reduce(communicator, plain->data, plain->count, plain->dtype,
               static_cast<Reduction>(reduction), Algorithm::kAuto);
  });
  if (made) mark_changed(arguments[0]);
  return made;
}

// reduce_scatter_flat(input, output, op, waits) -> bool
bool reduce_scatter_flat(Communicator& communicator, PyObject* const* arguments) {
  const auto input = as_plain(arguments[0]), output = as_plain(arguments[1]);
  const int reduction = code_of<Reduction, kReductions>(arguments[2]);
  if (!input || !output || !has_reduction(input->dtype, reduction) ||
      input->dtype != output->dtype || input->count != output->count * communicator.world_size() ||
      input->overlaps(*output)) {
    return false;
  }
  const bool made = run_without_gil_if_long(communicator, input->bytes(), waits(arguments[3]), [&] {
    reduce_scatter(communicator, input->data, output->data, output->count, output->dtype,
                   static_cast<Reduction>(reduction));
  });
  if (made) mark_changed(arguments[1]);
  return made;
}

// all_gather_flat(input, output, waits) -> bool
bool all_gather_flat(Communicator& communicator, PyObject* const* arguments) {
  const auto input = as_plain(arguments[0]), output = as_plain(arguments[1]);
  if (!can_gather(communicator, input, output)) return false;
  const size_t bytes = output->bytes();
  const bool made = run_without_gil_if_long(communicator, bytes, waits(arguments[2]), [&] {
    all_gather(communicator, input->data, output->data, input->count, input->dtype);
  });
  if (made) mark_changed(arguments[1]);
  return made;
}

// broadcast_flat(tensor, root, waits) -> bool
bool broadcast_flat(Communicator& communicator, PyObject* const* arguments) {
  const auto plain = as_plain(arguments[0]);
  const long root = PyLong_AsLong(arguments[1]);
  if (root == -1) PyErr_Clear();  // Python says what is wrong with it.
  if (!plain || root < 0 || root >= communicator.world_size()) return false;
  const bool made = run_without_gil_if_long(communicator, plain->bytes(), waits(arguments[2]), [&] {
    broadcast(communicator, plain->data, plain->count, plain->dtype, static_cast<int>(root));
  });
  if (made) mark_changed(arguments[0]);
  return made;
}

// A property of Communicator whose value is the method `call` with `parameters`, of the object.
template <bool (*call)(Communicator&, PyObject* const*), int parameters>
void define_fast_method(CommunicatorClass& cls, const char* name, const char* full_name) {
  static constexpr auto checked = [](PyObject* self, PyObject* const* arguments,
                                     Py_ssize_t count) -> PyObject* {
    if (count != parameters) {
      PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", parameters, count);
      return nullptr;
    }
    try {
      return PyBool_FromLong(call(py::handle(self).cast<Communicator&>(), arguments));
    } catch (...) {
      set_python_error();
      return nullptr;
    }
  };
  // The method's name differs from the property's: torch.compile would take a function of the
  // property's name for the descriptor that makes methods.
  static PyMethodDef method{};
  method = {full_name,
            reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(
                +static_cast<PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t)>(checked))),
            METH_FASTCALL, nullptr};
  cls.def_property_readonly(name, [](const py::object& self) {
    if (!py::isinstance<Communicator>(self)) throw py::type_error("no Communicator");
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
  });
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

  m.attr("DTYPES") = names_of<DType>(kDTypes);
  m.attr("REDUCIBLE_DTYPES") = names_of<DType>(kReducibleDTypes);
  m.attr("REDUCTIONS") = names_of<Reduction>(kReductions);
  m.attr("OPERATIONS") = names_of<Reduction>(kOperations);
  m.attr("ORDERS") = names_of<Order>(kOrders);
  m.attr("ALGORITHMS") = names_of<Algorithm>(kAlgorithms);
  m.attr("CALLS") = names_of<Operation>(kCalls);

  m.def("open_pidfd", &open_pidfd);
  m.def("has_reduction", [](int dtype, int reduction) {
    return has_reduction(dtype_of_code(dtype), static_cast<int>(reduction_of_code(reduction)));
  });

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def_static("create", &Segment::create, py::arg("world_size"))
      .def(py::init([](int fd, int world_size) {
             const NoGil no_gil;  // Not a call_guard: pybind11 registers the object in the call.
             return Segment::map(fd, world_size);
           }),
           py::arg("fd"), py::arg("world_size"));

  CommunicatorClass communicator(m, "Communicator");
  define_fast_method<&all_reduce_tensor, 4>(communicator, "all_reduce_tensor",
                                            "Communicator.all_reduce_tensor");
  define_fast_method<&all_gather_tensor, 2>(communicator, "all_gather_tensor",
                                            "Communicator.all_gather_tensor");
  define_fast_method<&all_reduce_flat, 3>(communicator, "all_reduce_flat",
                                          "Communicator.all_reduce_flat");
  define_fast_method<&reduce_scatter_flat, 4>(communicator, "reduce_scatter_flat",
                                              "Communicator.reduce_scatter_flat");
  define_fast_method<&all_gather_flat, 3>(communicator, "all_gather_flat",
                                          "Communicator.all_gather_flat");
  define_fast_method<&broadcast_flat, 3>(communicator, "broadcast_flat",
                                         "Communicator.broadcast_flat");
  communicator
      .def(py::init([](std::shared_ptr<Segment> segment, int rank, std::vector<int> pidfds,
                       double timeout) {
             const bool are_several_threads = pidfds.empty() && segment->world_size() > 1;
             const int ranks = pidfds.empty() ? 0 : segment->world_size();
             return std::make_shared<Communicator>(
                 std::move(segment), rank, std::move(pidfds), Seconds(timeout), &check_signals,
                 &GilUntilRelease::release,
                 [are_several_threads, rank] {
                   if (are_several_threads) check_not_alone(rank);
                 },
                 [ranks] { return ranks > 0 ? intra_op_threads(ranks) : 1; });
           }),
           py::arg("segment").none(false), py::arg("rank"), py::arg("pidfds"), py::arg("timeout"))
      .def("allocate",
           [](const Communicator& communicator, std::vector<int64_t> sizes, int dtype) {
             const DType type = dtype_of_code(dtype);
             auto buffer =
                 std::make_unique<SymmetricBuffer>(communicator.heap(), bytes_of(sizes, type));
             return to_capsule(std::move(buffer), type, std::move(sizes), dlpack::kCpu, 0);
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
      .def(
          "reduce",
          [](Communicator& communicator, uintptr_t data, size_t count, int dtype, int reduction,
             int root) {
            const DType type = dtype_of_code(dtype);
            reduce(communicator, address_of("data", data, count, type), count, type,
                   reduction_of_code(reduction), root);
          },
          py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("reduction"),
          py::arg("root"), WithoutGil())
      .def(
          "announce",
          [](Communicator& communicator, int call, int dtype, int reduction, int root,
             size_t count) {
            check_in_range("call", call, 0, kCalls - 1);
            check_in_range("root", root, 0, communicator.world_size() - 1);
            announce(communicator, {static_cast<Operation>(call),
                                    dtype_of_code(dtype),
                                    reduction_of_code(reduction),
                                    {},
                                    static_cast<uint32_t>(root),
                                    0,
                                    count});
          },
          py::arg("call"), py::arg("dtype"), py::arg("reduction"), py::arg("root"),
          py::arg("count"), WithoutGil())
      .def("barrier", &barrier, WithoutGil())
      .def("name", [](const std::shared_ptr<Communicator>& communicator,
                      int64_t handle) { communicators[handle] = communicator; })
      .def("close", &close)
      .def("abort", &Communicator::abort, WithoutGil());
  bind_messages(m, communicator);
}

}  // namespace pipekernels::python
