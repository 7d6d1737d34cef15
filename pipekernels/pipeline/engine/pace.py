"""Whether a pass runs inline or on threads, and there with backwards whole or in two parts:
measured, not guessed.

With tiny layers, lanes hand the interpreter lock back and forth on every operation, which costs
more than they hide; and a backward in two parts enters autograd once more for every layer. Where
the break-even lies depends on the model, the machine and its load, so the first passes of each kind
try all ways, the fastest is kept, and the others are tried again now and then, so rarely that each
costs about 1% of the time. Results do not depend on the choice: all ways run the same operations on
the same number of intra-op threads with the same random numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from pipekernels.pipeline.schedule.program import Schedule

Way = Literal["inline", "threads", "split"]
"""On the calling thread; on a thread per lane; likewise, with backwards in two parts."""

RECENT = 3
"""Passes of each way that are tried at first, and that are remembered; the best of them counts."""
RARELY = 5
"""The fewest passes between two trials of a slower way."""
COST = 0.01
"""Share of the time that trials of a slower way may take."""


class Kind(NamedTuple):
    """Alike for passes that take about equally long."""

    schedule: Schedule
    micro_batches: int
    size_bits: int
    """Length, in bits, of the number of elements of a micro-batch."""
    grad: bool
    training: tuple[bool, ...]
    """Training flag of each layer."""
    recomputed: int
    """How many micro-batches are recomputed."""
    may_split: bool


class _Record:
    """What is known of one kind of pass."""

    def __init__(self, ways: Sequence[Way]) -> None:
        self.seconds: dict[Way, deque[float]] = {way: deque(maxlen=RECENT) for way in ways}
        self.since_trial: dict[Way, int] = dict.fromkeys(ways, 0)
        self.warm = False

    def choose(self) -> Way:
        if not self.warm:
            return "inline"
        tried = {way: len(seconds) for way, seconds in self.seconds.items()}
        least = min(tried, key=tried.__getitem__)
        if tried[least] < RECENT:
            return least
        best_of = {way: min(seconds) for way, seconds in self.seconds.items()}
        fastest = min(best_of, key=best_of.__getitem__)
        for way, seconds in best_of.items():
            if way == fastest:
                continue
            self.since_trial[way] += 1
            if self.since_trial[way] > max(RARELY, (seconds / best_of[fastest] - 1) / COST):
                self.since_trial[way] = 0
                return way
        return fastest


class Pace:
    """Times the ways for each kind of pass and keeps to the fastest."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}

    def is_new(self, key: Hashable) -> bool:
        """Whether no pass of kind ``key`` has ended yet."""
        record = self._records.get(key)
        return record is None or not record.warm

    def choose(self, key: Hashable, ways: Sequence[Way]) -> Way:
        """The way for the next pass of kind ``key``. Until one has ended they run inline, to warm
        up.

        Args:
            key: what tells kinds apart that take about equally long.
            ways: those that are possible for this kind; always the same.
        """
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(ways)
        return record.choose()

    def record(self, key: Hashable, way: Way, seconds: float) -> None:
        """Note how long a pass of kind ``key`` took; the first is not counted."""
        record = self._records[key]
        if record.warm:
            record.seconds[way].append(seconds)
        record.warm = True


class Pass:
    """One pass: the way it goes, and how long it takes.

    Args:
        pace: what is known of passes.
        kind: its kind.
    """

    def __init__(self, pace: Pace, kind: Kind) -> None:
        self.is_first = pace.is_new(kind)
        ways: list[Way] = ["inline", "threads"]
        self.way = pace.choose(kind, [*ways, "split"] if kind.may_split else ways)
        self._pace = pace
        self._kind = kind
        self._seconds = 0.0

    def add(self, seconds: float, *, last: bool) -> None:
        """Count the time of a part of it, ``last`` if nothing follows: a forward counts together
        with its backward."""
        self._seconds += seconds
        if last:
            self._pace.record(self._kind, self.way, self._seconds)
