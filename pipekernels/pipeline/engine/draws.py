"""Where the random numbers of one run come from, and what is watched for while they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pipekernels.device.restoring import entered
from pipekernels.pipeline.stage.random_state import (
    BackwardWatch,
    DrawWatch,
    HookWatch,
    LaneRandom,
    RunRandom,
)

if TYPE_CHECKING:
    from pipekernels.pipeline.engine.engine import Engine


class Draws:
    """The random numbers of one run, as on one thread unless told otherwise.

    Args:
        engine: hears what is found out about the layers.

    Attributes:
        saw_tensor_hooks: whether a forward made hooks on tensors, if that was watched for.
    """

    def __init__(self, engine: Engine) -> None:
        self.saw_tensor_hooks = False
        self._engine = engine
        self._random = RunRandom(engine.devices)
        # A function, no method: that would keep this object in a reference cycle.
        self._way: Callable[[Draws, int, int], AbstractContextManager[Any]] = Draws._inline

    def of(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        """Entered around a task, on its thread."""
        return self._way(self, micro_batch, stage)

    def on_lanes(self) -> Callable[[], AbstractContextManager[Any]]:
        """From now on tasks run beside each other. Returns what makes the context to enter around
        backwards."""
        self._way = Draws._on_lane
        return partial(entered, DrawWatch(self._engine.refuse_hidden_randomness))

    def audited(self) -> Callable[[], AbstractContextManager[Any]]:
        """From now on it is watched, on one thread, whether lanes could keep all random numbers
        apart. Returns what makes the context to enter around backwards."""
        self._way = Draws._audited
        # A layer that recomputes its forward puts back the state of the process's generator, which
        # on lanes would be anybody's.
        watch = BackwardWatch(self._engine.note_hidden_randomness, self._engine.note_restores)
        return partial(entered, watch)

    def watch_hooks(self) -> None:
        """From now on hooks on tensors are noticed, as on lanes they always are."""
        if self._way is Draws._inline:
            self._way = Draws._watched

    def _inline(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        return self._random.inline(micro_batch, stage)

    @contextmanager
    def _watched(self, micro_batch: int, stage: int) -> Iterator[None]:
        with self._random.inline(micro_batch, stage), entered(HookWatch()) as watch:
            yield
        if watch.saw_tensor_hooks:
            self.saw_tensor_hooks = True

    @contextmanager
    def _on_lane(self, micro_batch: int, stage: int) -> Iterator[None]:
        with entered(self._random.on_lane(micro_batch, stage)) as watch:
            yield
        self._note(watch)

    @contextmanager
    def _audited(self, micro_batch: int, stage: int) -> Iterator[None]:
        with entered(self._random.audited(micro_batch, stage)) as watch:
            yield
        self._note(watch)
        if not watch.saw_everything():
            self._engine.note_hidden_randomness()

    def _note(self, watch: LaneRandom) -> None:
        if watch.saw_tensor_hooks:  # Not `|=`, by which lanes could undo each other's.
            self.saw_tensor_hooks = True
        if watch.drew:
            self._engine.note_draws()
