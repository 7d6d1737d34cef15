// The interpreter's lock, the GIL, for the bindings alone.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <optional>

namespace pipekernels::python {

// Gives the lock up for a while. As py::gil_scoped_release, whose destructor ends the whole process
// when the interpreter has ended meanwhile: until Python 3.14 it then ends threads that want its
// lock, by unwinding their stacks, which a destructor must not let pass. Here they stay where they
// are.
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

// Gives the lock up from the first release() in this thread on, which most small collectives,
// having little to wait for, never come to: giving it up and getting it back would take a tenth of
// them.
class GilUntilRelease {
 public:
  GilUntilRelease() : outer_(innermost_) { innermost_ = this; }
  ~GilUntilRelease() { innermost_ = outer_; }
  GilUntilRelease(const GilUntilRelease&) = delete;
  GilUntilRelease& operator=(const GilUntilRelease&) = delete;

  // Does nothing if the lock is not this class's to give up, or has been.
  static void release() {
    if (innermost_ && !innermost_->released_) innermost_->released_.emplace();
  }

 private:
  // A signal handler that is called while a collective waits may call another one.
  static inline thread_local GilUntilRelease* innermost_ = nullptr;
  GilUntilRelease* const outer_;
  std::optional<NoGil> released_;
};

}  // namespace pipekernels::python
