"""Measures which execution is fastest: inline, on threads, or on threads with split backwards.

With tiny layers, passing the interpreter lock between lanes on every operation costs more than the
overlap saves; and a backward in two parts enters autograd once more for every layer. Which is
faster depends on the model and the machine. So the first mini-batches of each kind try all
executions in turn, and the fastest is kept for good. Later trials would compare times measured
under different loads, and where executions are almost equally fast, they would be a quarter of all
runs.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from pipekernels.pipeline.schedule.program import Schedule

_log = logging.getLogger(__name__)

FIRST = "first"
"""The execution of mini-batches before the first one has ended: inline, to warm up, not counted."""

TRIALS = 3
"""Number of trials of each execution; the shortest counts."""


class Signature(NamedTuple):
    """Mini-batches with equal ones are expected to take about equally long."""

    schedule: Schedule
    micro_batches: int
    size_bits: int  # Length, in bits, of the number of elements of a micro-batch.
    grad: bool  # Whether a backward can follow.
    training: tuple[bool, ...]  # Training flag of each layer.
    recomputed: int  # Number of recomputed micro-batches.
    trains: bool  # Whether it is a training step, whose schedule the user chose.

    @property
    def may_split(self) -> bool:
        """Whether backwards that are whole in the schedule may run in two parts."""
        return self.grad and not self.recomputed and not self.trains

    def __str__(self) -> str:
        return (
            f"{self.schedule.name} of {self.micro_batches} micro-batches of less than "
            f"2**{self.size_bits} elements, {'with' if self.grad else 'without'} gradients, "
            f"{self.recomputed} recomputed"
        )


class Auto:
    """Chooses the execution of mini-batches with one signature."""

    def __init__(self, signature: Signature) -> None:
        executions = ["inline", "threads", *["split"] * signature.may_split]
        self._signature = signature
        self._seconds: dict[str, list[float]] = {name: [] for name in executions}
        self._fastest: str | None = None  # Unknown until all have been tried.
        self._is_warm = False

    def choose(self) -> str:
        """The execution of the next mini-batch."""
        if not self._is_warm:
            return FIRST
        if self._fastest is not None:
            return self._fastest
        least = min(self._seconds, key=lambda name: len(self._seconds[name]))
        _log.debug("%s: tries %s", self._signature, least)
        return least

    def record(self, execution: str, seconds: float) -> None:
        """Note how long a mini-batch took that ran by ``execution``."""
        if execution == FIRST:
            self._is_warm = True
            return
        if self._fastest is not None:
            return
        self._seconds[execution].append(seconds)
        if all(len(found) >= TRIALS for found in self._seconds.values()):
            best = {name: min(found) for name, found in self._seconds.items()}
            self._fastest = min(best, key=best.__getitem__)
            times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in best.items())
            _log.info("%s: %s, the fastest (%s)", self._signature, self._fastest, times)
