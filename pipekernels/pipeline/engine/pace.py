"""Measures which execution is fastest: inline, on threads, or on threads with split backwards.

With tiny layers, passing the interpreter lock between lanes on every operation costs more than the
overlap saves; and a backward in two parts enters autograd once more for every layer. Which is
faster depends on the model, the machine and its load. So the first passes of each kind try all
executions, the fastest is kept, and the others are tried again so rarely that each costs about 1%
of the time. Results do not depend on the choice: all run the same operations on the same number of
intra-op threads with the same random numbers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from pipekernels.pipeline.schedule.program import Schedule

_log = logging.getLogger(__name__)

Way = Literal["inline", "threads", "split"]
"""On the calling thread; on a thread per lane; likewise, with backwards in two parts."""

RECENT = 3
"""Number of first trials of each execution, and of latest times kept; the smallest counts."""
RARELY = 5
"""The fewest passes between two trials of a slower execution."""
COST = 0.01
"""Share of the time that trials of a slower execution may take."""


class Kind(NamedTuple):
    """Passes of equal kind are expected to take about equally long."""

    schedule: Schedule
    micro_batches: int
    size_bits: int
    """Length, in bits, of the number of elements of a micro-batch."""
    grad: bool
    training: tuple[bool, ...]
    """Training flag of each layer."""
    recomputed: int
    """Number of recomputed micro-batches."""
    may_split: bool

    def __str__(self) -> str:
        return (
            f"{self.schedule.name} of {self.micro_batches} micro-batches of less than "
            f"2**{self.size_bits} elements, {'with' if self.grad else 'without'} gradients, "
            f"{self.recomputed} recomputed"
        )


class _Record:
    """The times of one kind of pass."""

    def __init__(self, key: Hashable, ways: Sequence[Way]) -> None:
        self.key = key
        self.fastest: Way | None = None  # As last logged.
        self.seconds: dict[Way, deque[float]] = {way: deque(maxlen=RECENT) for way in ways}
        self.since_trial: dict[Way, int] = dict.fromkeys(ways, 0)
        self.warm = False

    def choose(self) -> Way:
        if not self.warm:
            return "inline"
        tried = {way: len(seconds) for way, seconds in self.seconds.items()}
        least = min(tried, key=tried.__getitem__)
        if tried[least] < RECENT:
            _log.debug("%s: tries %s", self.key, least)
            return least
        best_of = {way: min(seconds) for way, seconds in self.seconds.items()}
        fastest = min(best_of, key=best_of.__getitem__)
        if fastest != self.fastest:
            self.fastest = fastest
            times = ", ".join(f"{way} {1e3 * s:.3g} ms" for way, s in best_of.items())
            _log.info("%s: %s, the fastest (%s)", self.key, fastest, times)
        for way, seconds in best_of.items():
            if way == fastest:
                continue
            self.since_trial[way] += 1
            if self.since_trial[way] > max(RARELY, (seconds / best_of[fastest] - 1) / COST):
                self.since_trial[way] = 0
                _log.debug("%s: tries %s again", self.key, way)
                return way
        return fastest


class Pace:
    """Chooses the fastest execution for each kind of pass, from measured times."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}

    def is_new(self, key: Hashable) -> bool:
        """Whether no pass of kind ``key`` has ended yet."""
        record = self._records.get(key)
        return record is None or not record.warm

    def choose(self, key: Hashable, ways: Sequence[Way]) -> Way:
        """The execution of the next pass of kind ``key``: inline until one has ended, to warm up.
        ``ways`` are the possible ones, always the same for a kind."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(key, ways)
        return record.choose()

    def record(self, key: Hashable, way: Way, seconds: float) -> None:
        """Note how long a pass of kind ``key`` took; the first one is ignored."""
        record = self._records[key]
        if record.warm:
            record.seconds[way].append(seconds)
        record.warm = True


class Pass:
    """One pass: its execution, and how long it takes."""

    def __init__(self, pace: Pace, kind: Kind) -> None:
        self.is_first = pace.is_new(kind)
        ways: list[Way] = ["inline", "threads"]
        self.way = pace.choose(kind, [*ways, "split"] if kind.may_split else ways)
        self._pace = pace
        self._kind = kind
        self._seconds = 0.0

    def add(self, seconds: float, *, last: bool) -> None:
        """Add the time of a forward or backward; ``last`` if no backward follows."""
        self._seconds += seconds
        if last:
            self._pace.record(self._kind, self.way, self._seconds)
