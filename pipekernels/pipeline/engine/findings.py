"""What a pipe has observed about its layers while running them."""

from __future__ import annotations


class LayerFindings:
    """Kept across mini-batches, which add to it from any thread. ``changing_buffers`` has the ids
    of buffers that layers change in their forwards."""

    def __init__(self) -> None:
        self.changing_buffers: set[int] = set()
        self._hidden_randomness = False
        self._draws = False
        self._restores = False

    def note_hidden_randomness(self) -> None:
        """Note that layers draw random numbers that lanes cannot seed separately."""
        self._hidden_randomness = True

    def note_draws(self) -> None:
        """Note that layers draw random numbers that lanes can seed separately."""
        self._draws = True

    def note_restores(self) -> None:
        """Note that layers restore an earlier state of the process-wide generator, as layers do
        that recompute themselves. That changes the random numbers of other threads."""
        self._restores = True

    def refuse_hidden_randomness(self) -> None:
        """Note random numbers drawn by a backward on a lane, and raise a RuntimeError. From the
        next mini-batch on the pipe runs on one thread."""
        self.note_hidden_randomness()
        raise RuntimeError(
            "a layer of the pipe has begun to draw random numbers in its backward, as layers do "
            "that checkpoint themselves; run this mini-batch again, and the pipe will keep to one "
            "thread"
        )

    def needs_one_thread(self) -> bool:
        """Whether random numbers would depend on timing if stages ran on several threads."""
        return self._hidden_randomness or (self._draws and self._restores)
