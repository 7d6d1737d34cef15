"""One limit for all the waits of something that has several."""

from __future__ import annotations

import time
from datetime import timedelta


class Deadline:
    """When something must have ended.

    Args:
        seconds: from now on.

    Attributes:
        seconds: as above.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then; 0 if it is over."""
        return max(self._end - time.monotonic(), 0.0)

    def for_store(self) -> timedelta:
        """:meth:`left` as a limit of a store: to which 0 may mean none."""
        return timedelta(seconds=max(self.left(), 0.01))

    def for_socket(self) -> float:
        """:meth:`left` as a limit of a socket: which waits for 24 days at most, and for 0 not at
        all."""
        return max(min(self.left(), 1e6), 0.001)

    def early(self) -> Deadline:
        """An earlier one, for what others have to hear of before this one if it fails."""
        return Deadline(0.75 * self.left())
