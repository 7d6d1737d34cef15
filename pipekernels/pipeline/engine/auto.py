"""Measures which execution is fastest: inline, on threads, or on threads with split backwards.

With tiny layers, passing the interpreter lock between lanes on every operation costs more than the
overlap saves; and a backward in two parts enters autograd once more for every layer. Which is
faster depends on the model, the machine and its load. So the first mini-batches of each kind try
all executions, the fastest is kept, and the others are tried again so rarely that each costs about
1% of the time.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from pipekernels.pipeline.schedule.program import Schedule

_log = logging.getLogger(__name__)

FIRST = "first"
"""The execution of mini-batches before the first one has ended: inline, to warm up, not counted."""

SAMPLES_KEPT = 3
"""Number of first trials of each execution, and of latest times kept; the smallest counts."""
MIN_RUNS_BETWEEN_TRIALS = 5
TRIAL_TIME_SHARE = 0.01
"""Share of the time that trials of a slower execution may take."""


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
        self._seconds = {name: deque[float](maxlen=SAMPLES_KEPT) for name in executions}
        self._runs_since_trial = dict.fromkeys(executions, 0)
        self._fastest = ""  # As last logged.
        self._is_warm = False

    def choose(self) -> str:
        """The execution of the next mini-batch."""
        if not self._is_warm:
            return FIRST
        least = min(self._seconds, key=lambda name: len(self._seconds[name]))
        if len(self._seconds[least]) < SAMPLES_KEPT:
            _log.debug("%s: tries %s", self._signature, least)
            return least
        best = {name: min(seconds) for name, seconds in self._seconds.items()}
        fastest = min(best, key=best.__getitem__)
        if fastest != self._fastest:
            self._fastest = fastest
            times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in best.items())
            _log.info("%s: %s, the fastest (%s)", self._signature, fastest, times)
        for name, seconds in best.items():
            if name == fastest:
                continue
            self._runs_since_trial[name] += 1
            rarely = (seconds / best[fastest] - 1) / TRIAL_TIME_SHARE
            if self._runs_since_trial[name] > max(MIN_RUNS_BETWEEN_TRIALS, rarely):
                self._runs_since_trial[name] = 0
                _log.debug("%s: tries %s again", self._signature, name)
                return name
        return fastest

    def record(self, execution: str, seconds: float) -> None:
        """Note how long a mini-batch took that ran by ``execution``."""
        if self._is_warm and execution != FIRST:
            self._seconds[execution].append(seconds)
        self._is_warm = True
