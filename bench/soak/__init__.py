"""Long random tests of what collectives guarantee: equal sums, errors for lost ranks.

``python -m bench.soak``, or ``make soak``; the tests have a short version of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report.tables import duration, markdown

__all__ = ["table"]


def table(rows: list[dict[str, Any]], others: Sequence[list[dict[str, Any]]] = ()) -> str:
    """A row per trial: number of runs, outcome, and time until survivors noticed a loss: of one
    machine, and the slowest of all."""

    def slowest(trial: str) -> str:
        found = [row["max"] for each in (rows, *others) for row in each if row["trial"] == trial
                 if "max" in row]  # fmt: skip
        return duration(max(found)) if found else ""

    return markdown(
        ["trial", "runs", "collectives", "outcome", "p50", "p99", "slowest", "on all machines"],
        [
            [*(str(row[key]) for key in ("trial", "runs", "collectives", "outcome"))]
            + [duration(row[q]) if q in row else "" for q in ("p50", "p99", "max")]
            + [slowest(row["trial"])]
            for row in rows
        ],
    )
