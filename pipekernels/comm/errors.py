"""What a collective raises when another rank is gone."""

from __future__ import annotations


class PeerError(RuntimeError):
    """Another rank has died, closed its communicator, or given up after an error of its own.

    The communicator cannot be used any more; those that are left may make a new one.

    Attributes:
        rank: the rank that is gone; ``None`` if it is on another host, from where only the end of a
            connection was heard.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, int | None]]:
        return PeerError, (str(self), self.rank)
