"""How mini-batches run: inline, or with a worker per lane.

Results do not depend on that: all executions run the same operations on the same number of intra-op
threads with the same random numbers.

Which is fastest depends on the model and the machine: with tiny layers, passing the interpreter
lock between threads on every operation costs more than the overlap saves; and a backward in two
parts enters autograd once more for every layer. So the first mini-batches of a signature try all
executions in turn, and the fastest is kept for good. Later trials would compare times measured
under different loads, and where executions are almost equally fast be a quarter of all runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from pipekernels.pipeline.context import needs_this_thread
from pipekernels.pipeline.engine import workers
from pipekernels.pipeline.engine.random import Audit, HookWatch, Seeds, WorkerRandom
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.schedule import Action, Program, Schedule, order_of_issue

_log = logging.getLogger(__name__)

Execution = Literal["auto", "inline", "threads", "split"]
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
"""``auto``: whichever measures fastest; ``inline``: on the calling thread; ``threads``: a worker
per lane; ``split``: also with backwards in two parts where possible."""

FIRST = "first"
"""The execution until a first mini-batch of these layers has ended: inline, watched, not timed."""

TRIALS = 3
"""Number of trials of each execution; the shortest counts."""


class Signature(NamedTuple):
    """Mini-batches with equal ones are expected to take about equally long."""

    schedule: Schedule
    micro_batches: int
    size_bits: int  # Length, in bits, of the number of elements of a microbatch.
    grad: bool  # Whether a backward can follow.
    training: tuple[bool, ...]  # Training flag of each layer.
    recomputed: int  # Number of recomputed microbatches.
    trains: bool  # Whether it is a training step, whose schedule the user chose.

    @property
    def may_split(self) -> bool:
        """Whether backwards that are whole in the schedule may run in two parts."""
        return self.grad and not self.recomputed and not self.trains

    def __str__(self) -> str:
        return (
            f"{self.schedule.name} of {self.micro_batches} microbatches of less than "
            f"2**{self.size_bits} elements, {'with' if self.grad else 'without'} gradients, "
            f"{self.recomputed} recomputed"
        )


class Auto:
    """Chooses the execution of mini-batches with one signature."""

    def __init__(self, signature: Signature) -> None:
        executions = ["inline", "threads"]
        if signature.may_split:
            executions.append("split")
        self._signature = signature
        self._seconds: dict[str, list[float]] = {name: [] for name in executions}
        self._fastest: str | None = None  # Unknown until all have been tried.
        self.is_warm = False

    def choose(self) -> str:
        """The execution of the next mini-batch."""
        if not self.is_warm:
            return FIRST
        if self._fastest is not None:
            return self._fastest
        return min(self._seconds, key=lambda name: len(self._seconds[name]))

    def record(self, execution: str, seconds: float) -> None:
        """Note how long a mini-batch took that ran by ``execution``."""
        if execution == FIRST:
            self.is_warm = True
            return
        if self._fastest is not None:  # Of a mini-batch that began before the last trial ended.
            return
        self._seconds[execution].append(seconds)
        # The shortest of each: disturbances only make trials longer.
        if all(len(found) >= TRIALS for found in self._seconds.values()):
            best = {name: min(found) for name, found in self._seconds.items()}
            self._fastest = min(best, key=best.__getitem__)
            times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in best.items())
            _log.info("%s: %s, the fastest (%s)", self._signature, self._fastest, times)


class Plan:
    """How mini-batches with one signature run by one execution.

    Args:
        execution: one of ``EXECUTIONS`` but ``auto``, or ``FIRST``: inline, and audited.
        fuses: whether stages run as one task where possible.
    """

    def __init__(
        self, stages: Stages, signature: Signature, execution: str, *, fuses: bool
    ) -> None:
        schedule, micro_batches = signature.schedule, signature.micro_batches
        # The workers share the intra-op threads. Inline, actions get the same share, so that the
        # execution cannot change the bits.
        at_once = min(schedule.lanes(len(stages.tasks)), micro_batches)
        self._threads = torch.get_num_threads()
        if stages.one_thread is None:
            self._threads = max(1, self._threads // at_once)
        self._on_workers = execution in ("threads", "split")
        # As one task, stages of one device make fewer graphs, which autograd enters once. Not if
        # they share a layer: its gradients would be added up in another order than apart.
        fuses = fuses and (micro_batches == 1 or not stages.share_layers)
        self.is_fused = fuses and not self._on_workers and stages.fused is not None
        self.tasks = [stages.fused] if self.is_fused and stages.fused else stages.tasks
        split = execution == "split"
        self.program = schedule.program(len(self.tasks), micro_batches, split=split)
        # The first mini-batch finds out whether workers could seed all that layers draw. On one
        # thread later ones look for nothing, unless backwards in two parts would call hooks twice.
        observed = stages.observed
        self.make_seeds = partial(Seeds, stages.generators)
        if execution == FIRST:
            backward = partial(Audit, observed, backward=True)
            self.make_seeds = partial(self.make_seeds, lambda _: Audit(observed), backward)
        elif self._on_workers:
            random = partial(WorkerRandom, observed)
            self.make_seeds = partial(Seeds, (), random, random)
        elif self.program.splits:
            self.make_seeds = partial(self.make_seeds, lambda _: HookWatch(observed))
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
        with nullcontext() if same else workers.intra_op_threads(self._threads):
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

    def choose(
        self, signature: Signature, *, fuses: bool
    ) -> tuple[Plan, Callable[[float], object] | None]:
        """The plan of the next mini-batch, and what is to be called with the seconds that it took,
        when it has ended. ``fuses`` is that of :class:`Plan`."""
        record = None
        why = self._why_inline(signature)
        if why is not None:
            execution = "inline"
        elif self._execution == "auto":
            auto = self._auto.get(signature) or self._auto.setdefault(signature, Auto(signature))
            execution = auto.choose()
            record = partial(auto.record, execution)
        elif self._execution == "split" and not signature.may_split:
            execution = "threads"
            why = "execution='split' asks for it, but no backward here can run in two parts"
        else:
            execution = self._execution
            why = f"execution={execution!r} asks for it"
        # A plan divides the caller's intra-op threads, whose number may change.
        key = signature, execution, fuses, torch.get_num_threads()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan(self._stages, signature, execution, fuses=fuses)
            if why is not None:  # Auto logs the others.
                stages, name = len(self._stages.tasks), signature.schedule.name
                message = "a pipe of %d stages, %s, %d microbatches: %s (%s)"
                _log.info(message, stages, name, signature.micro_batches, execution, why)
        return plan, record

    def forget(self) -> None:
        """Drop the plans and watch the next mini-batch of each signature: layers have changed."""
        self._plans.clear()
        for auto in self._auto.values():
            auto.is_warm = False

    def _why_inline(self, signature: Signature) -> str | None:
        """Why the next mini-batch has to run on the calling thread; None if it need not."""
        if self._execution == "inline":
            return "execution='inline' asks for it"
        if self._stages.one_thread is not None:
            return self._stages.one_thread
        if min(len(self._stages.tasks), signature.micro_batches) < 2:
            return "a single stage or microbatch has nothing to run beside"
        if needs_this_thread():
            return "a mode, the profiler or hooks on saved tensors observe the calling thread"
        if self._stages.observed.needs_one_thread():
            return "layers draw random numbers that workers cannot seed apart"
        return None
