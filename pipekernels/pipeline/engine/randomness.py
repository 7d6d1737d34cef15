"""Where the random numbers of one mini-batch come from, and what is watched for while they are
drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from pipekernels.device.restoring import entered
from pipekernels.pipeline.engine.findings import LayerFindings
from pipekernels.pipeline.stage.random_state import (
    BackwardWatch,
    DrawWatch,
    HookWatch,
    LaneRandom,
    RunRandom,
)

Mode = Literal["inline", "hooks", "audited", "threads"]
"""Tasks run one after another; likewise, and hooks on tensors are noticed; likewise, and it is
watched whether threads could keep all random numbers apart; tasks run beside each other."""


class TaskRandomness:
    """The random numbers of each (stage, micro-batch) of one mini-batch.

    Making one draws a number from the default CPU generator.

    Args:
        devices: where the stages are.
        findings: hears what is found out about the layers.
        mode: how the tasks run.

    Attributes:
        saw_tensor_hooks: whether a forward made hooks on tensors; unknown in mode ``'inline'``.
        in_backward: makes the context in which graphs are gone through backwards.
    """

    def __init__(
        self, devices: Sequence[torch.device], findings: LayerFindings, mode: Mode
    ) -> None:
        self.saw_tensor_hooks = False
        self.in_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._findings = findings
        self._random = RunRandom(list(devices))
        self._mode = mode
        if mode == "threads":
            self.in_backward = partial(entered, DrawWatch(findings.refuse_hidden_randomness))
        elif mode == "audited":
            # A layer that recomputes its forward puts back the state of the process's generator,
            # which on lanes would be anybody's.
            watch = BackwardWatch(findings.note_hidden_randomness, findings.note_restores)
            self.in_backward = partial(entered, watch)

    def of(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        """Entered around a task, on its thread."""
        if self._mode == "inline":
            return self._random.inline(micro_batch, stage)
        if self._mode == "hooks":
            return self._watching_hooks(micro_batch, stage)
        return self._watching_draws(micro_batch, stage)

    @contextmanager
    def _watching_hooks(self, micro_batch: int, stage: int) -> Iterator[None]:
        with self._random.inline(micro_batch, stage), entered(HookWatch()) as watch:
            yield
        if watch.saw_tensor_hooks:
            self.saw_tensor_hooks = True

    @contextmanager
    def _watching_draws(self, micro_batch: int, stage: int) -> Iterator[None]:
        audits = self._mode == "audited"
        with entered(self._task_random(micro_batch, stage, audits)) as watch:
            yield
        if watch.saw_tensor_hooks:  # Not `|=`, by which lanes could undo each other's.
            self.saw_tensor_hooks = True
        if watch.drew:
            self._findings.note_draws()
        if audits and not watch.saw_everything():
            self._findings.note_hidden_randomness()

    def _task_random(self, micro_batch: int, stage: int, audits: bool) -> LaneRandom:
        make = self._random.audited if audits else self._random.on_lane
        return make(micro_batch, stage)
