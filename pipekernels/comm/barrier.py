"""A communicator for each of several ranks that are threads of one process."""

from __future__ import annotations

from pipekernels.comm.communicator import Communicator


class CollectiveBarrier:
    """Makes the communicators of ``world_size`` ranks that are threads, one for each; arguments
    and errors as for :meth:`pipekernels.Communicator.threads`."""

    def __init__(self, world_size: int, *, timeout: float = 30.0) -> None:
        self._communicators = Communicator.threads(world_size, timeout=timeout)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._communicators)

    def communicator(self, rank: int) -> Communicator:
        """The communicator of ``rank``, for its thread to use.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        return self._communicators[rank]

    def wait(self, rank: int) -> None:
        """Return when all ranks have called it; errors as in :meth:`Communicator.barrier`."""
        self.communicator(rank).barrier()
