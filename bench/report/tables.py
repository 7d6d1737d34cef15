"""Tables in Markdown, figures in their units, and plots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FORMATS = {"share": ".0%", "of copy": ".0%", "of bound": ".0%", "GB/s": ".0f", "wrong": "d"}


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


def spread(figures: Mapping[str, float], text: Any = duration) -> str:
    """From the 10th percentile to the 90th of a :func:`bench.harness.summary`."""
    return f"{text(figures['p10'])} to {text(figures['p90'])}"


def between(figures: Sequence[float], digits: str = ".2f") -> str:
    """The range of ``figures``; nothing of fewer than two."""
    return f"{min(figures):{digits}} to {max(figures):{digits}}" if len(figures) > 1 else ""


def speed_ups(rows: Sequence[Row], base: str) -> dict[tuple[str, str], float]:
    """The median of ``base`` over that of each candidate, by case and candidate."""
    bases = {row["case"]: row["median"] for row in rows if row.get("candidate") == base}
    return {
        (row["case"], row["candidate"]): bases[row["case"]] / row["median"]
        for row in rows
        if row.get("case") in bases and "median" in row
    }


def table(
    rows: Sequence[Row],
    others: Sequence[Sequence[Row]],
    base: str,
    unit: str = "seconds",
    columns: Sequence[str] = (),
) -> str:
    """A row per case and candidate.

    Args:
        rows: of the machine that the table is about.
        others: of other machines: the table has the range of each ratio over all.
        base: the candidate that the others are compared with. If no other machine has it, ranges
            are those of ratios to the first candidate.
        unit: of the figures: ``'seconds'`` or ``'bytes'``.
        columns: further fields of rows to show.
    """
    text = duration if unit == "seconds" else size
    ratios, machines = speed_ups(rows, base), [speed_ups(each, base) for each in (rows, *others)]
    common = base
    if sum(map(bool, machines)) < 2:  # The first candidate is one that older files have as well.
        common = next((row["candidate"] for row in rows if "median" in row), base)
        machines = [speed_ups(each, common) for each in (rows, *others)]
    header = ["case", "candidate", "median", "p10 to p90", f"{base} / it"]
    count = sum(map(bool, machines))
    header.append(
        f"{common} / it, on {count} machines" if common != base else f"on {count} machines"
    )
    header += columns
    lines = []
    for row in rows:
        if "median" not in row:
            continue
        key = row["case"], row["candidate"]
        line = [*key, text(row["median"]), spread(row, text)]
        line.append(f"{ratios[key]:.2f}" if key in ratios else "")
        found = [each[key] for each in machines if key in each]
        line.append("" if row["candidate"] == common else between(found))
        for name in columns:
            line.append(f"{row[name]:{FORMATS.get(name, '')}}" if name in row else "")
        lines.append(line)
    kept = [i for i in range(len(header)) if i < 4 or any(line[i] for line in lines)]
    return markdown([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


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
