// Guards that release Python's global interpreter lock (GIL).
#pragma once

#include <Python.h>
#include <unistd.h>

#include <optional>

namespace pipekernels::python {

// Releases the GIL during its lifetime, like py::gil_scoped_release. The destructor of the latter
// terminates the process if the interpreter has shut down meanwhile: before Python 3.14, a thread
// that requests the GIL then is ended by unwinding its stack, which must not leave a destructor.
// This destructor catches that and keeps the thread waiting forever.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  ~NoGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) pause();
    }
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Holds the GIL until the first release() in this thread, then releases it for the rest of its
// lifetime. Most small collectives hardly wait and never call release(); releasing and reacquiring
// the GIL would take a tenth of their time.
class GilUntilRelease {
 public:
  GilUntilRelease() : outer_(innermost_) { innermost_ = this; }
  ~GilUntilRelease() { innermost_ = outer_; }
  GilUntilRelease(const GilUntilRelease&) = delete;
  GilUntilRelease& operator=(const GilUntilRelease&) = delete;

  // Does nothing without an object in this thread, or if it has released the GIL already.
  static void release() {
    if (innermost_ && !innermost_->released_) innermost_->released_.emplace();
  }

 private:
  // Objects nest if a signal handler, called while a collective waits, calls another collective.
  static inline thread_local GilUntilRelease* innermost_ = nullptr;
  GilUntilRelease* const outer_;
  std::optional<NoGil> released_;
};

}  // namespace pipekernels::python
