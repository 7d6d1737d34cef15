"""One time limit for an operation that waits several times."""

from __future__ import annotations

import time
from datetime import timedelta


class Deadline:
    """A point in time, ``seconds`` from now, until which something must have ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; 0 once the deadline has passed."""
        return max(self._end - time.monotonic(), 0.0)

    def for_store(self) -> timedelta:
        """:meth:`left` as a timeout of a store, where 0 may mean no timeout."""
        return timedelta(seconds=max(self.left(), 0.01))

    def for_socket(self) -> float:
        """:meth:`left` as a timeout of a socket: at most 24 days, and 0 would mean non-blocking."""
        return max(min(self.left(), 1e6), 0.001)

    def early(self) -> Deadline:
        """An earlier deadline, which leaves time to report a failure to the peers."""
        return Deadline(0.75 * self.left())
