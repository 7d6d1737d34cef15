"""The table of `make soak`, which tests/support/sweeps/collectives.py runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report.tables import duration, markdown


def table(rows: list[dict[str, Any]], others: Sequence[list[dict[str, Any]]] = ()) -> str:
    """A row per trial: number of runs, outcome, and time until survivors noticed a loss: of one
    machine, and the slowest of all."""
    told = ("trial", "runs", "collectives", "outcome")
    lines = []
    for row in rows:
        every = [r for found in (rows, *others) for r in found if r["trial"] == row["trial"]]
        slowest = max((r["max"] for r in every if "max" in r), default=None)
        lines.append(
            [str(row[key]) for key in told]
            + [duration(row[key]) if key in row else "" for key in ("p50", "p99", "max")]
            + ["" if slowest is None else duration(slowest)]
        )
    return markdown([*told, "p50", "p99", "slowest", "on all machines"], lines)
