"""The tables and the plot of a result file."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from bench.gpu.timing import errors
from bench.nccl.collectives import OPERATIONS, TENSORS, Row
from bench.nccl.ranks import OURS
from bench.report.tables import markdown, microseconds, svg

CONDITIONS = {
    "collectives and layer": "calls in a row on all ranks, the slowest rank's time per call; "
    "candidates in turn on the same tensors, medians",
    "pipe": "forward and backward until all devices are idle, candidates in turn, medians",
    "wrong": "elements of all ranks' results, before and after",
}
CASE = ("part", "operation", "tensor", "place", "type", "size", "tokens", "rows")


def table(rows: list[Row]) -> str:
    """A table for each operation; GB/s and us, as nccl-tests prints them."""
    parts = [row["left out"] for row in rows if "left out" in row]
    measured = [row for row in rows if "candidates" in row]
    for operation in OPERATIONS:
        for tensor in TENSORS:
            for place in ("out", "in"):
                chosen = [
                    row
                    for row in measured
                    if (row.get("operation"), row.get("tensor"), row.get("place"))
                    == (operation, tensor, place)
                ]
                where = "in place" if place == "in" else "out of place"
                parts += _part(f"{operation}, {tensor} tensors, {where}", chosen)
    layer = [row for row in measured if row["part"] == "layer"]
    parts += _part("Row-parallel layer; size of its result", layer, "tokens")
    pipe = [row for row in measured if row["part"] == "pipe"]
    parts += _part("Pipe; size of what a micro-batch hands on", pipe, "stages")
    return "\n\n".join(parts) + errors(rows, *CASE)


def wrong(rows: list[Row]) -> int:
    """The number of wrong elements in all rows."""
    return sum(figures["wrong"] for row in rows for figures in row.get("candidates", {}).values())


def _part(title: str, rows: list[Row], *keys: str) -> list[str]:
    """A title with a table, or nothing without rows."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row["candidates"]))
    bandwidths = ["algbw", "busbw"] if "algbw" in rows[0]["candidates"][names[0]] else []
    header = [*keys, "size (B)", "count", "type", "redop"]
    for name in names:
        header += [f"{name}: time", *bandwidths, "#wrong"]
    peer = names[-1]
    ours = [name for name in names if name.startswith(OURS)]
    header += [f"{peer} / {name}" for name in ours]
    lines, ratios = [], dict[str, list[float]]()
    for row in rows:
        line = [str(row[key]) for key in (*keys, "size", "count", "type", "redop")]
        for name in names:
            figures = row["candidates"][name]
            line.append(microseconds(figures))
            line += [f"{figures[key]:.2f}" for key in bandwidths]
            line.append(str(figures["wrong"]))
        for name in ours:
            ratio = row["candidates"][peer]["median"] / row["candidates"][name]["median"]
            ratios.setdefault(name, []).append(ratio)
            line.append(f"{ratio:.2f}")
        lines.append(line)
    means = [
        f"Geometric mean of {peer} / {name}: "
        f"{math.exp(statistics.fmean(map(math.log, found))):.2f}."
        for name, found in ratios.items()
    ]
    title = f"**{title}; {rows[0]['ranks']} ranks**"
    return [title, markdown(header, lines), *means]


def plot(rows: list[Row], path: Path) -> None:
    """Bus bandwidth over size in the first dtype, an axis per collective, as an SVG file.
    Of torch's backend only that of ordinary tensors.
    """
    measured = [row for row in rows if "operation" in row and "candidates" in row]
    dtype = measured[0]["type"] if measured else ""
    with svg(path, len(OPERATIONS)) as axes:
        for axis, operation in zip(axes, OPERATIONS, strict=True):
            lines: dict[str, list[tuple[int, float]]] = {}
            for row in measured:
                if (row["operation"], row["type"]) != (operation, dtype):
                    continue
                for name, figures in row["candidates"].items():
                    if name == OURS or row["tensor"] == "ordinary":
                        label = f"{name}, {row['tensor']}, {row['place']}"
                        lines.setdefault(label, []).append((row["size"], figures["busbw"]))
            for label, points in sorted(lines.items()):
                style: dict[str, Any] = {} if label.startswith(OURS) else {"linestyle": "--"}
                axis.plot(*zip(*points, strict=True), marker=".", label=label, **style)
            axis.set(title=f"{operation}, {dtype}", xlabel="bytes")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            if lines:
                axis.legend(fontsize="small")
        axes[0].set_ylabel("bus bandwidth in GB/s")
