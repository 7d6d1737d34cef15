"""Calls of ``torch.distributed`` that run on a thread of their group, or have run."""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DONE: concurrent.futures.Future[None] = concurrent.futures.Future()
DONE.set_result(None)


class Work(dist.Work):
    """A call that runs on the group's thread, or has run."""

    def __init__(self, call: concurrent.futures.Future[None], results: list[Tensor]) -> None:
        super().__init__()
        self._call = call
        self._results = results

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the call; raise its error. A timeout of 0 means no timeout."""
        try:
            self._call.result(timeout.total_seconds() or None)
        except concurrent.futures.TimeoutError as error:
            if self._call.done():
                raise
            raise TimeoutError(f"the collective has not ended within {timeout}") from error
        finally:
            del self  # As in _await().
        return True

    def is_completed(self) -> bool:
        return self._call.done()

    def is_success(self) -> bool:
        return self._call.done() and self._call.exception() is None

    def exception(self) -> BaseException | None:
        return self._call.exception() if self._call.done() else None

    def result(self) -> list[Tensor]:
        return _await(self._call, self._results)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        # Raise an error from a callback: only then does C++ see it as an error.
        ended: torch.futures.Future[None] = torch.futures.Future()
        answer = ended.then(functools.partial(_await, self._call, self._results))
        caller = threading.get_ident()

        def end(call: concurrent.futures.Future[None]) -> None:
            if threading.get_ident() == caller and call.exception() is not None:
                # On another thread: the error's traceback would keep the frames of this one alive,
                # and with them what the caller holds.
                threading.Thread(target=ended.set_result, args=(None,)).start()
            else:
                ended.set_result(None)

        self._call.add_done_callback(end)
        return answer


def _await(
    call: concurrent.futures.Future[None], results: list[Tensor], ended: Any = None
) -> list[Tensor]:
    """Wait for ``call``; returns ``results`` or raises its error. ``ended`` is for callbacks."""
    try:
        call.result()
        return results
    finally:
        del call, results, ended  # A call's error keeps this frame alive through its traceback.


class _Ended(dist.Work):
    """A call that has ended, for callers that only wait."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


ENDED = _Ended()


class CopiedWork(dist.Work):
    """A call of another group that fills ``dense``, whose end copies that to ``tensor``."""

    def __init__(self, call: dist.Work, dense: Tensor, tensor: Tensor) -> None:
        super().__init__()
        self._call = call
        self._copy: Callable[[], object] | None = functools.partial(tensor.copy_, dense)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the call, then copy."""
        ended = self._call.wait(timeout) if timeout else self._call.wait()
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()
        return ended

    def is_completed(self) -> bool:
        return self._call.is_completed()

    def source_rank(self) -> int:
        return self._call._source_rank()

    _source_rank = source_rank
