"""What the acts report, and the picture and the summary read."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOISE = 1.05  # Ratios up to this one do not count as faster.


@dataclass(frozen=True)
class Check:
    """A property that a run must have; ``text`` states the values and the limits."""

    text: str
    holds: bool

    def __str__(self) -> str:
        return f"{'ok' if self.holds else 'FAILED'}: {self.text}"


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of two or more samples."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return Spread(statistics.median(samples), deciles[0], deciles[-1])

    def __str__(self) -> str:
        return f"{rounded(self.median)} ({rounded(self.p10)} to {rounded(self.p90)})"


@dataclass(frozen=True)
class SpeedUp:
    """``ratio``: the peer's time over that of pipekernels; above 1, pipekernels is faster."""

    work: str
    peer: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.work} {self.ratio:.2f}x as fast as {self.peer}"


def rounded(value: float) -> str:
    """Three digits, or whole numbers."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
