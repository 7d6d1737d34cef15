"""How mini-batches run: inline, or with a worker per lane.

Results do not depend on that: all executions run the same operations on the same number of intra-op
threads with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch

from pipekernels.pipeline.context import NOTHING, needs_this_thread
from pipekernels.pipeline.engine import workers
from pipekernels.pipeline.engine.random import Audit, HookWatch, WorkerRandom
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.schedule import Action, Program, Schedule, order_of_issue

Execution = Literal["auto", "inline", "threads"]
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
"""``auto``: whichever measures faster; ``inline``: on the calling thread; ``threads``: a worker per
lane."""

FIRST = "first"
"""The execution until a first mini-batch of these layers has ended: inline, watched, not timed."""


class ExecutionPlan:
    """How mini-batches of one kind run.

    Args:
        stages: what they run.
        schedule, micro_batches: those of the mini-batches.
        execution: one of ``EXECUTIONS`` but ``auto``, or ``FIRST``.
        fuses: whether stages run as one task where possible.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        micro_batches: int,
        execution: str,
        *,
        fuses: bool,
    ) -> None:
        # The workers share the intra-op threads. Inline, actions get the same share, so that the
        # execution cannot change the bits.
        at_once = min(schedule.lanes(len(stages.tasks)), micro_batches)
        self._threads = torch.get_num_threads()
        if stages.one_thread is None:
            self._threads = max(1, self._threads // at_once)
        self._on_workers = execution == "threads"
        # As one task, stages of one device make fewer graphs, which autograd enters once. Not if
        # they share a layer: its gradients would be added up in another order than apart.
        fuses = fuses and (micro_batches == 1 or not stages.share_layers)
        self.is_fused = fuses and not self._on_workers and stages.fused is not None
        self.tasks = [stages.fused] if self.is_fused and stages.fused else stages.tasks
        self.program = schedule.program(len(self.tasks), micro_batches)
        # Generators that are seeded before each task; what makes, of the seed, a context for a
        # task's forward or its recomputation; and one in which autograd runs a stage's backward.
        self.generators = [] if self._on_workers else stages.generators
        self.drawing: Callable[[int], AbstractContextManager[Any]] | None = None
        self.in_autograd: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self._on_workers:
            self.drawing = self.in_autograd = partial(WorkerRandom, stages.observed)
        elif execution == FIRST:  # The layers are not known yet.
            self.drawing = lambda _: Audit(stages.observed)
            self.in_autograd = partial(Audit, stages.observed, backward=True)
        elif any(action.type == "I" for action in self.program.order):
            self.drawing = lambda _: HookWatch(stages.observed)
        self._on_host = stages.on_host if stages.with_streams else None

    def run(self, program: Program, compute: Callable[[Action, Any], Any]) -> None:
        """Run all actions of ``program``: that of the mini-batch, or its forwards or backwards.
        ``compute`` runs an action, given the result of the one that sends to it, or None."""
        # The caller may have entered a mode for the backward alone.
        if self._on_workers and not needs_this_thread():
            workers.run_program(program, compute, self._threads)
            return
        # Inline. Where devices work asynchronously, the order of issue keeps them all busy.
        order = program.order
        if self._on_host is not None:
            order = order_of_issue(program, self._on_host)
        results: dict[Action, Any] = {}
        same = torch.get_num_threads() == self._threads
        with NOTHING if same else workers.intra_op_threads(self._threads):
            for action in order:
                try:
                    result = compute(action, results.pop(action, None))
                except Exception as error:
                    workers.add_note(error, action, self.tasks[action.stage].name)
                    raise
                receiver = program.receivers.get(action)
                if receiver is not None:
                    results[receiver] = result
