"""What a pipe has observed about its layers while running them."""

from __future__ import annotations

import threading

from pipekernels.pipeline.stage.other_random import Source


class ObservedLayerBehavior:
    """Kept across mini-batches, which add to it from any thread.

    Attributes:
        changing_buffers: ids of buffers that layers change in their forwards.
        generators: those that layers have given to torch's functions, by id.
        knows_generators: whether a mini-batch has been watched for them.
        draws_elsewhere: whether layers draw random numbers that are not torch's, which lanes cannot
            put into an order.
        turn: held by each task of such layers.
    """

    def __init__(self) -> None:
        self.changing_buffers: set[int] = set()
        self.generators: dict[object, Source] = {}
        self.knows_generators = False
        self.draws_elsewhere = False
        self.turn = threading.RLock()
        self._hidden_randomness = False
        self._draws = False
        self._restores = False

    def note_hidden_randomness(self) -> None:
        """Note that layers draw random numbers that lanes cannot seed separately."""
        self._hidden_randomness = True

    def note_draws(self) -> None:
        """Note that layers draw random numbers that lanes can seed separately."""
        self._draws = True

    def note_draws_elsewhere(self) -> None:
        """Set ``draws_elsewhere``."""
        self.draws_elsewhere = True

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
        one_state = self._draws and self._restores
        return self._hidden_randomness or self.draws_elsewhere or one_state
