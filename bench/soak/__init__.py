"""What collectives promise, tried many thousand times: one sum, lost ranks, different calls.

``python -m bench.soak``, or ``make soak``; too long for the tests, which have a little of each.
"""

from __future__ import annotations

from typing import Any

from bench.report import duration, markdown

__all__ = ["table"]


def table(rows: list[dict[str, Any]]) -> str:
    """A row per trial: how often, what came out, and how long survivors took to hear of a loss."""
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
