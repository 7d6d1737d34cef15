"""The error for a lost rank."""

from __future__ import annotations


class PeerError(RuntimeError):
    """Another rank has died, closed its communicator, or given up after an error of its own.

    The communicator cannot be used any more; the remaining ranks may make a new one.

    Attributes:
        rank: the lost rank.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, int]]:
        return PeerError, (str(self), self.rank)
