"""Seeds the tasks of one mini-batch, and watches how their layers draw random numbers."""

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
    RunRandom,
)

Mode = Literal["inline", "hooks", "audited", "threads"]
"""``inline``: tasks run one after another. ``hooks``: likewise, and hooks on tensors are noted.
``audited``: likewise, and it is checked whether lanes could seed all random numbers. ``threads``:
tasks run at the same time."""


class TaskRandomness:
    """The random numbers of each (stage, micro-batch) of one mini-batch.

    The constructor draws a number from the default CPU generator.

    Args:
        devices: of the stages.
        findings: gets what is observed about the layers.
        mode: how the tasks run.

    Attributes:
        saw_tensor_hooks: whether a forward made hooks on tensors; always False in mode 'inline'.
        in_backward: returns the context in which autograd runs a graph's backward.
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
            # A layer that recomputes its forward restores the state of the process-wide generator,
            # which other lanes use too.
            watch = BackwardWatch(findings.note_hidden_randomness, findings.note_restores)
            self.in_backward = partial(entered, watch)

    def of(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        """A context for a task, entered on its thread."""
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
        make = self._random.audited if audits else self._random.on_lane
        with entered(make(micro_batch, stage)) as watch:
            yield
        if watch.saw_tensor_hooks:  # Not `|=`, which is not atomic: lanes run this concurrently.
            self.saw_tensor_hooks = True
        if watch.drew:
            self._findings.note_draws()
        if audits and not watch.saw_everything():
            self._findings.note_hidden_randomness()
