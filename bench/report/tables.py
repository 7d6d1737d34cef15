"""Tables in Markdown, figures in their units, and plots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; the first column left-aligned, the others right-aligned."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def duration(seconds: float) -> str:
    """Three significant digits, in s, ms, us or ns."""
    rounded = float(f"{seconds:.3g}")
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if rounded >= scale:
            return f"{rounded / scale:g} {unit}"
    return f"{rounded * 1e9:g} ns"


def size(count: float) -> str:
    """Three significant digits of a number of bytes, in MiB."""
    return f"{count / 2**20:.3g} MiB"


def microseconds(figures: Mapping[str, float] | None) -> str:
    """The median of a :func:`bench.harness.summary`, in microseconds; nothing for None."""
    return "" if figures is None else f"{figures['median'] * 1e6:.2f}"


def spread(figures: Mapping[str, float]) -> str:
    """From the 10th percentile to the 90th, in seconds, of a :func:`bench.harness.summary`."""
    return f"{duration(figures['p10'])} to {duration(figures['p90'])}"


def speed_ups(rows: list[dict[str, Any]], base: str) -> str:
    """A table with a row per case and candidate, and the ``'speed-up over <base>'`` of ``rows``."""
    speed_up = f"speed-up over {base}"
    return markdown(
        ["case", "candidate", "median", "p10 to p90", speed_up],
        [
            [
                row["case"],
                row["candidate"],
                duration(row["median"]),
                spread(row),
                f"{row[speed_up]:.2f}",
            ]
            for row in rows
        ],
    )


@contextlib.contextmanager
def svg(path: Path, count: int = 1, *, width: float = 5.5, height: float = 4.5) -> Iterator[Any]:
    """``count`` axes side by side, of ``width x height`` inches each, written to an SVG file that
    is identical for the same data."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pipekernels"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, count, figsize=(width * count, height), sharey=True, squeeze=False
    )
    yield axes[0]
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
