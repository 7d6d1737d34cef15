"""The asynchronous calls of a group: what torch is given for one, and where they run."""

from __future__ import annotations

import concurrent.futures
import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._torch_private import dispatch_mode_count

# Seconds that a short call leaves to callers who wait: they run it themselves, sooner than the
# thread, for which they would have to wait.
LAG = 2e-4
Call = concurrent.futures.Future[None]

DONE = Call()
DONE.set_result(None)


class Calls:
    """The calls of a group that are left. They run one after another, in the order in which they
    were made: on the thread of a caller who waits, or else on a thread of the group.

    Attributes:
        last: the latest call.
        is_urgent: ends the lag of short calls.
    """

    def __init__(self) -> None:
        self.last = DONE
        self.is_urgent = threading.Event()
        self._left: deque[tuple[Call, Callable[[], object]]] = deque()
        self._turn = threading.Lock()  # Held while a call runs, with its callbacks.
        self._runner: int | None = None  # The thread that holds it.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "pipekernels")

    def add(self, body: Callable[[], object], is_short: bool) -> Call:
        """Have ``body`` called after all earlier calls and their callbacks have ended."""
        self.last = call = Call()
        self._left.append((call, body))
        (self.is_urgent.clear if is_short else self.is_urgent.set)()
        self._thread.submit(self._run_on_thread, call)
        return call

    def run(self, call: Call) -> None:
        """Run what is left up to ``call``, on this thread."""
        while not call.done():
            with self._turn:
                if not self._left:
                    continue
                self._runner = threading.get_ident()
                next_call, body = self._left.popleft()
                try:
                    body()
                except BaseException as error:  # noqa: BLE001 (Work.wait() raises it.)
                    next_call.set_exception(error)
                else:
                    next_call.set_result(None)
                self._runner = None

    def are_here(self) -> bool:
        """Whether this thread runs a call, or a callback of one."""
        return self._runner == threading.get_ident()

    def are_done(self) -> bool:
        """Whether all calls have ended, with their callbacks."""
        return not self._left and self._runner is None

    def shutdown(self) -> None:
        """End the thread, after the calls that are left."""
        self.is_urgent.set()
        self._thread.shutdown(wait=False)

    def _run_on_thread(self, call: Call) -> None:
        if not call.done():
            self.is_urgent.wait(LAG)
        self.run(call)


class Work(dist.Work):
    """A call that is among ``calls``, or has ended."""

    def __init__(self, call: Call, results: list[Tensor], calls: Calls | None = None) -> None:
        super().__init__()
        self._call = call
        self._results = results
        self._calls = calls

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the call; raise its error. A timeout of 0 means no timeout."""
        if self._call is DONE:
            return True
        # A call has no timeout but the group's, and modes must not see what it does.
        if self._calls and not (timeout or self._calls.are_here() or dispatch_mode_count()):
            self._calls.run(self._call)
        try:
            self._call.result(timeout.total_seconds() or None)
        except concurrent.futures.TimeoutError as error:
            if self._call.done():  # The collective's own error: a rank is late.
                raise
            raise TimeoutError(f"the collective has not ended within {timeout}") from error
        return True

    def is_completed(self) -> bool:
        return self._call.done()

    def is_success(self) -> bool:
        return self._call.done() and self._call.exception() is None

    def exception(self) -> BaseException | None:
        return self._call.exception() if self._call.done() else None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        ended: torch.futures.Future[None] = torch.futures.Future()
        # Raise an error from a callback: only then does C++ see it as an error.
        answer = ended.then(lambda _: self.result())
        self._call.add_done_callback(lambda _: ended.set_result(None))
        if self._calls:
            self._calls.is_urgent.set()
        return answer


ENDED = Work(DONE, [])
