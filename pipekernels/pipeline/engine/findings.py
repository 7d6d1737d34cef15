"""What running a pipe's layers has shown about them."""

from __future__ import annotations


class LayerFindings:
    """Kept by a pipe from mini-batch to mini-batch; mini-batches add to it, from any thread.

    Attributes:
        changing_buffers: ids of buffers that layers change in their forwards.
    """

    def __init__(self) -> None:
        self.changing_buffers: set[int] = set()
        self._hidden_randomness = False
        self._draws = False
        self._restores = False

    def note_hidden_randomness(self) -> None:
        """Random numbers are drawn where threads could not keep those of different stages apart."""
        self._hidden_randomness = True

    def note_draws(self) -> None:
        """Layers draw random numbers where threads keep them apart."""
        self._draws = True

    def note_restores(self) -> None:
        """Layers put the process's generator into an earlier state, as those do that recompute
        themselves. Threads that draw from it meanwhile would draw other numbers."""
        self._restores = True

    def refuse_hidden_randomness(self) -> None:
        """For random numbers that a backward draws on a lane.

        Raises:
            RuntimeError: always; from the next mini-batch on the pipe runs on one thread.
        """
        self.note_hidden_randomness()
        raise RuntimeError(
            "a layer of the pipe has begun to draw random numbers in its backward, as layers do "
            "that checkpoint themselves; run this mini-batch again, and the pipe will keep to one "
            "thread"
        )

    def needs_one_thread(self) -> bool:
        """Whether random numbers would depend on timing if stages ran on several threads."""
        return self._hidden_randomness or (self._draws and self._restores)
