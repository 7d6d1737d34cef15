"""Time limits: one for an operation that waits several times, and what users may give."""

from __future__ import annotations

import time
from numbers import Real

_LONGEST = 1e9  # Seconds, 31 years; 64-bit clocks of nanoseconds overflow after 292 years.


class Deadline:
    """A point in time, ``seconds`` from now, until which something must have ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; 0 once the deadline has passed."""
        return max(self._end - time.monotonic(), 0.0)

    def for_socket(self) -> float:
        """:meth:`left` as a timeout of a socket: at most 24 days, and 0 would mean non-blocking."""
        return max(min(self.left(), 1e6), 0.001)


def check_timeout(timeout: float) -> None:
    """Raise TypeError or ValueError unless ``timeout`` is a time for a rank to wait."""
    if not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds, got {type(timeout).__name__}")
    if not 0 < timeout <= _LONGEST:
        raise ValueError(
            f"timeout must be a positive number of seconds, at most {_LONGEST:.0e}, got {timeout}"
        )
