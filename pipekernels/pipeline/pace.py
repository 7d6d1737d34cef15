"""Whether a pass runs inline or on lanes: measured, not guessed.

With tiny layers, lanes hand the interpreter lock back and forth on every operation, which costs
more than they hide. Where the break-even lies depends on the model, the machine and its load, so
the first passes of each kind try both ways, the faster one is kept, and the other is tried again
now and then, so rarely that it costs about 1% of the time. Results do not depend on the choice:
both ways run the same operations on the same number of intra-op threads with the same random
numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Literal

Way = Literal["inline", "lanes"]

RECENT = 3
"""Passes of each way that are tried at first, and that are remembered; the best of them counts."""
RARELY = 20
"""The fewest passes between two trials of the slower way."""
COST = 0.01
"""Share of the time that trials of the slower way may take."""


class _Record:
    def __init__(self) -> None:
        self.seconds: dict[Way, deque[float]] = {
            "inline": deque(maxlen=RECENT),
            "lanes": deque(maxlen=RECENT),
        }
        self.warm = False
        self.since_trial = 0

    def choose(self) -> Way:
        inline, lanes = self.seconds["inline"], self.seconds["lanes"]
        if not self.warm:
            return "inline"
        if min(len(inline), len(lanes)) < RECENT:
            return "lanes" if len(lanes) <= len(inline) else "inline"
        slower, faster = max(min(inline), min(lanes)), min(min(inline), min(lanes))
        best: Way = "lanes" if min(lanes) < min(inline) else "inline"
        self.since_trial += 1
        if self.since_trial > max(RARELY, (slower / faster - 1) / COST):
            self.since_trial = 0
            return "inline" if best == "lanes" else "lanes"
        return best


class Pace:
    """Times both ways for each kind of pass and keeps to the faster."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}

    def is_new(self, key: Hashable) -> bool:
        """Whether no pass of kind ``key`` was ever chosen a way."""
        return key not in self._records

    def choose(self, key: Hashable) -> Way:
        """The way for the next pass of kind ``key``. The first one runs inline and warms up."""
        return self._records.setdefault(key, _Record()).choose()

    def record(self, key: Hashable, way: Way, seconds: float) -> None:
        """Note how long a pass of kind ``key`` took; the first is not counted."""
        record = self._records[key]
        if record.warm:
            record.seconds[way].append(seconds)
        record.warm = True
