"""Seeds the tasks of one mini-batch, and watches how their layers draw random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

from pipekernels.pipeline.engine.findings import ObservedLayerBehavior
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.stage.context import entered
from pipekernels.pipeline.stage.other_random import OtherRandom, States
from pipekernels.pipeline.stage.random_state import (
    BackwardWatch,
    DrawWatch,
    HookWatch,
    MiniBatchSeeds,
)

Mode = Literal["inline", "hooks", "audited", "threads"]
"""``inline``: tasks run one after another. ``hooks``: likewise, and hooks on tensors are noted.
``audited``: likewise, and it is checked whether lanes could seed all random numbers. ``threads``:
tasks run at the same time."""


class TaskRandomness:
    """The random numbers of each (stage, micro-batch) of one mini-batch.

    The constructor draws a number from the default CPU generator.

    Args:
        stages: the pipe's.
        findings: gets what is observed about the layers.
        mode: how the tasks run.

    Attributes:
        saw_tensor_hooks: whether a forward made hooks on tensors; always False in mode 'inline'.
        in_backward: returns the context in which autograd runs a graph's backward.
    """

    def __init__(self, stages: Stages, findings: ObservedLayerBehavior, mode: Mode) -> None:
        self.saw_tensor_hooks = False
        self.in_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._findings = findings
        self._random = MiniBatchSeeds(stages.devices)
        self._other = OtherRandom(stages.modules, findings.generators)
        self._mode = mode
        if mode == "threads":
            self.in_backward = partial(entered, DrawWatch(findings.refuse_hidden_randomness))
        elif mode == "audited":
            # A layer that recomputes its forward restores the state of the process-wide generator,
            # which other lanes use too.
            watch = BackwardWatch(findings.note_hidden_randomness, findings.note_restores)
            self.in_backward = partial(entered, watch)

    def of(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        """A context for a forward, entered on its thread."""
        if self._mode == "audited":  # The forward that decides about lanes.
            return self.kept(micro_batch, stage)
        return self._seeded(micro_batch, stage, {})

    @contextmanager
    def kept(self, micro_batch: int, stage: int) -> Iterator[None]:
        """As :meth:`of`, for a forward that :meth:`again` can repeat."""
        findings = self._findings
        with self._turn(findings.draws_elsewhere):
            recorded = self._other.recorded(stage, micro_batch, findings.note_draws_elsewhere)
            with recorded as states, self._seeded(micro_batch, stage, states):
                yield

    @contextmanager
    def again(self, micro_batch: int, stage: int) -> Iterator[None]:
        """A context for a recomputation, which gets the random numbers of its forward."""
        drew = self._other.drew(stage, micro_batch)
        with self._turn(drew), self._seeded(micro_batch, stage, {}):
            alone = self._mode != "threads"
            with self._other.replayed(stage, micro_batch, alone=alone) if drew else nullcontext():
                yield

    def _turn(self, needed: bool) -> AbstractContextManager[Any]:
        return self._findings.turn if needed and self._mode == "threads" else nullcontext()

    def _seeded(self, micro_batch: int, stage: int, states: States) -> AbstractContextManager[None]:
        if self._mode == "inline":
            return self._random.inline(micro_batch, stage)
        if self._mode == "hooks":
            return self._watching_hooks(micro_batch, stage, states)
        return self._watching_draws(micro_batch, stage, states)

    @contextmanager
    def _watching_hooks(self, micro_batch: int, stage: int, states: States) -> Iterator[None]:
        with self._random.inline(micro_batch, stage), entered(HookWatch(states)) as watch:
            yield
        if watch.saw_tensor_hooks:
            self.saw_tensor_hooks = True

    @contextmanager
    def _watching_draws(self, micro_batch: int, stage: int, states: States) -> Iterator[None]:
        audits = self._mode == "audited"
        make = self._random.audited if audits else self._random.on_lane
        with entered(make(micro_batch, stage, states)) as watch:
            yield
        if watch.saw_tensor_hooks:  # Not `|=`, which is not atomic: lanes run this concurrently.
            self.saw_tensor_hooks = True
        if watch.drew:
            self._findings.note_draws()
        if audits and not watch.saw_everything():
            self._findings.note_hidden_randomness()
