"""Trials of executions: which one a mini-batch gets, and why.

Which is faster depends on the model and the machine: with tiny layers, passing the interpreter lock
between threads on every operation costs more than the overlap saves. So the first mini-batches of a
signature try both executions in turn, and the faster one is kept for good: load changes, and where
both are almost equally fast, trials would be a quarter of all mini-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pipekernels.pipeline.engine.execution import FIRST, ExecutionPlan
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.schedule import Schedule

_log = logging.getLogger(__name__)

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

    def __str__(self) -> str:
        return (
            f"{self.schedule.name} of {self.micro_batches} microbatches of less than "
            f"2**{self.size_bits} elements, {'with' if self.grad else 'without'} gradients, "
            f"{self.recomputed} recomputed"
        )


class Conditions(NamedTuple):
    """What else decides how a mini-batch runs."""

    fuses: bool  # Whether stages may run as one task.
    intra_op_threads: int  # The caller's, which a plan divides.
    is_observed: bool  # Whether the calling thread observes operations.
    needs_one_thread: bool  # Whether layers draw random numbers that workers cannot seed.


class Auto:
    """Chooses the execution of mini-batches with one signature."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._seconds: dict[str, list[float]] = {"inline": [], "threads": []}
        self.fastest: str | None = None  # Unknown until both have been tried.
        self.is_warm = False

    def choose(self) -> str:
        """The execution of the next mini-batch."""
        if not self.is_warm:
            return FIRST
        if self.fastest is not None:
            return self.fastest
        return min(self._seconds, key=lambda name: len(self._seconds[name]))

    def record(self, execution: str, seconds: float) -> None:
        """Note how long a mini-batch took that ran by ``execution``."""
        if execution == FIRST:
            self.is_warm = True
            return
        if self.fastest is not None:  # Of a mini-batch that began before the last trial ended.
            return
        self._seconds[execution].append(seconds)
        # The shortest of each: disturbances only make trials longer.
        if all(len(found) >= TRIALS for found in self._seconds.values()):
            best = {name: min(found) for name, found in self._seconds.items()}
            self.fastest = min(best, key=best.__getitem__)
            times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in best.items())
            _log.info("%s: %s, the fastest (%s)", self._signature, self.fastest, times)


class Executions:
    """Chooses how a pipe's mini-batches run; ``execution`` is one of ``EXECUTIONS``.

    Attributes:
        settled: the plans of mini-batches for which nothing is left to choose.
    """

    def __init__(self, stages: Stages, execution: str) -> None:
        self.settled: dict[tuple[Signature, Conditions], ExecutionPlan] = {}
        self._stages = stages
        self._execution = execution
        self._auto: dict[Signature, Auto] = {}

    def choose(
        self, signature: Signature, conditions: Conditions
    ) -> tuple[ExecutionPlan, Callable[[float], object] | None]:
        """The plan of the next mini-batch, and what is to be called with the seconds that it took,
        when it has ended."""
        auto: Auto | None = None
        why = self._why_inline(signature, conditions)
        execution = "inline"
        if why is None and self._execution == "auto":
            auto = self._auto.setdefault(signature, Auto(signature))
            execution = auto.choose()
        elif why is None:
            execution = self._execution
            why = f"execution={execution!r} asks for it"
        count, fuses = signature.micro_batches, conditions.fuses
        plan = ExecutionPlan(self._stages, signature.schedule, count, execution, fuses=fuses)
        if auto is not None and execution != auto.fastest:
            return plan, partial(auto.record, execution)
        if why is not None:  # Auto logs the others.
            stages, name = len(self._stages.tasks), signature.schedule.name
            message = "a pipe of %d stages, %s, %d microbatches: %s (%s)"
            _log.info(message, stages, name, count, execution, why)
        self.settled[signature, conditions] = plan
        return plan, None

    def forget(self) -> None:
        """Drop the plans and watch the next mini-batch of each signature: layers have changed."""
        self.settled.clear()
        for auto in self._auto.values():
            auto.is_warm = False

    def _why_inline(self, signature: Signature, conditions: Conditions) -> str | None:
        """Why the next mini-batch has to run on the calling thread; None if it need not."""
        if self._execution == "inline":
            return "execution='inline' asks for it"
        if self._stages.one_thread is not None:
            return self._stages.one_thread
        if min(len(self._stages.tasks), signature.micro_batches) < 2:
            return "a single stage or microbatch has nothing to run beside"
        if conditions.is_observed:
            return "a mode, the profiler or hooks on saved tensors observe the calling thread"
        if conditions.needs_one_thread:
            return "layers draw random numbers that workers cannot seed apart"
        return None
