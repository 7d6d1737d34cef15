"""Calls of ``torch.distributed`` that run on a thread of their group, or have run."""

from __future__ import annotations

import concurrent.futures
import datetime
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
        return answer


class _Ended(dist.Work):
    """A call that has ended, for callers that only wait."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


ENDED = _Ended()
