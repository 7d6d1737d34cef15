"""Long random tests of what collectives guarantee: equal sums, errors for lost ranks.

``python -m bench.soak``, or ``make soak``; the tests have a short version of each.
"""

from __future__ import annotations

from typing import Any

from bench.report.tables import duration, markdown

__all__ = ["table"]


def table(rows: list[dict[str, Any]]) -> str:
    """A row per trial: number of runs, outcome, and time until survivors noticed a loss."""
    return markdown(
        ["trial", "runs", "collectives", "outcome", "p50", "p99", "slowest"],
        [
            [
                row["trial"],
                str(row["runs"]),
                str(row["collectives"]),
                row["outcome"],
                *(duration(row[q]) if q in row else "" for q in ("p50", "p99", "max")),
            ]
            for row in rows
        ],
    )
