"""How mini-batches run: inline, or on a thread per lane.

Results do not depend on that: all executions run the same operations on the same number of intra-op
threads with the same random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from pipekernels.pipeline.engine import lanes
from pipekernels.pipeline.engine.auto import FIRST, Auto, Signature
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.schedule.program import Action, Program, Schedule, order_of_issue
from pipekernels.pipeline.stage.context import needs_this_thread
from pipekernels.pipeline.stage.random_state import AuditedSeeds, HookedSeeds, LaneSeeds, Seeds

_log = logging.getLogger(__name__)

EXECUTIONS = ("auto", "inline", "threads", "split")
"""``auto``: whichever measures fastest; ``inline``: on the calling thread; ``threads``: a thread
per lane; ``split``: also with backwards in two parts where possible."""


class Plan:
    """How mini-batches with one signature run by one execution.

    Args:
        execution: one of ``EXECUTIONS`` but ``auto``, or ``FIRST``: inline, and audited.
        fuses: whether stages run as one task where possible.

    Attributes:
        tasks: one per stage, or a single one of all stages.
        program: its actions.
        is_fused: whether there is a single task of all stages.
        make_seeds: makes the random numbers of a mini-batch.
    """

    def __init__(
        self, stages: Stages, signature: Signature, execution: str, *, fuses: bool
    ) -> None:
        schedule, micro_batches = signature.schedule, signature.micro_batches
        most_lanes = min(schedule.lanes(len(stages.tasks)), micro_batches)
        # The same number inline and on lanes, so that the execution cannot change the bits.
        self._threads = torch.get_num_threads()
        if stages.one_thread is None:
            self._threads = max(1, self._threads // most_lanes)
        self._on_lanes = execution in ("threads", "split")
        self.is_fused = fuses and not self._on_lanes and stages.fused is not None
        self.tasks = [stages.fused] if self.is_fused and stages.fused else stages.tasks
        split = execution == "split"
        self.program = schedule.program(len(self.tasks), micro_batches, split=split)
        kind: type[Seeds] = HookedSeeds if self.program.splits else Seeds
        if execution == FIRST:
            kind = AuditedSeeds
        elif self._on_lanes:
            kind = LaneSeeds
        self.make_seeds = partial(kind, stages.generators, stages.observed)
        self._waits = stages.done_when_issued if stages.with_streams else None

    def run(self, program: Program, compute: Callable[[Action, Any], Any]) -> None:
        """Run all actions of ``program``: that of the mini-batch, or its forwards or backwards.
        ``compute`` runs an action, given the result of the one that sends to it, or None."""
        # The caller may have entered a mode for the backward alone.
        if self._on_lanes and not needs_this_thread():
            lanes.run_program(program, compute, self._threads)
            return
        order = program.order
        if self._waits is not None:
            order = order_of_issue(program, self._waits)
        results: dict[Action, Any] = {}
        same = torch.get_num_threads() == self._threads
        with nullcontext() if same else lanes.intra_op_threads(self._threads):
            for action in order:
                result = compute(action, results.pop(action, None))
                receiver = program.receivers.get(action)
                if receiver is not None:
                    results[receiver] = result


class Executions:
    """Chooses how a pipe's mini-batches run; ``execution`` is one of ``EXECUTIONS``."""

    def __init__(self, stages: Stages, execution: str) -> None:
        self._stages = stages
        self._execution = execution
        self._auto: dict[Signature, Auto] = {}
        self._plans: dict[tuple[Signature, str, bool, int], Plan] = {}
        self._logged: set[tuple[Schedule, int, str, str]] = set()

    def choose(
        self, signature: Signature, *, fuses: bool
    ) -> tuple[Plan, Callable[[float], object] | None]:
        """The plan of the next mini-batch, and what is to be called with the seconds that it took,
        when it has ended. ``fuses`` is that of :class:`Plan`."""
        execution, why, record = "inline", self._why_inline(signature), None
        if why is None and self._execution == "auto":
            auto = self._auto.get(signature) or self._auto.setdefault(signature, Auto(signature))
            execution = auto.choose()
            record = partial(auto.record, execution)
        elif why is None:
            execution, why = self._execution, f"execution={self._execution!r} asks for it"
            if execution == "split" and not signature.may_split:
                execution, why = "threads", f"{why}, but no backward here can run in two parts"
        if why is not None and _log.isEnabledFor(logging.INFO):
            self._log_choice(signature, execution, why)
        key = signature, execution, fuses, torch.get_num_threads()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan(self._stages, signature, execution, fuses=fuses)
        return plan, record

    def forget(self) -> None:
        """Drop the plans: layers have changed."""
        self._plans.clear()

    def _why_inline(self, signature: Signature) -> str | None:
        """Why the next mini-batch has to run on the calling thread; None if it need not."""
        if self._execution == "inline":
            return "execution='inline' asks for it"
        if self._stages.one_thread is not None:
            return self._stages.one_thread
        if min(len(self._stages.tasks), signature.micro_batches) < 2:
            return "a single stage or micro-batch has nothing to run beside"
        if needs_this_thread():
            return "a mode, the profiler or hooks on saved tensors observe the calling thread"
        if self._stages.observed.needs_one_thread():
            return "layers draw random numbers that lanes cannot seed apart"
        return None

    def _log_choice(self, signature: Signature, execution: str, why: str) -> None:
        """Log a choice when it is first made; :class:`Auto` logs those by time."""
        choice = (signature.schedule, signature.micro_batches, execution, why)
        if choice not in self._logged:
            self._logged.add(choice)
            name, micro_batches = signature.schedule.name, signature.micro_batches
            message = "a pipe of %d stages, %s, %d micro-batches: %s (%s)"
            _log.info(message, len(self._stages.tasks), name, micro_batches, execution, why)
