"""Tables in Markdown, figures in their units, and plots."""

from __future__ import annotations

import contextlib
import io
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.harness import Row

FORMATS = {"hidden": ".0%"} | dict.fromkeys(("algbw", "busbw", "loss"), ".4g")


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


def between(figures: Sequence[float], text: Callable[[float], str] = "{:.2f}".format) -> str:
    """The range of ``figures``; nothing of fewer than two."""
    return f"{text(min(figures))} to {text(max(figures))}" if len(figures) > 1 else ""


def speed_ups(rows: Sequence[Row], base: str | Sequence[str]) -> dict[tuple[Any, ...], float]:
    """The median of ``base``, or of the first of several that a case has, over each candidate's
    median, by part, case and candidate."""
    names = [base] if isinstance(base, str) else base
    bases = {
        (row.get("part"), row["case"]): row["median"]
        for name in reversed(names)
        for row in rows
        if row.get("candidate") == name and "median" in row and "case" in row
    }
    return {
        (*key, row["candidate"]): bases[key] / row["median"]
        for row in rows
        if "median" in row and (key := (row.get("part"), row.get("case"))) in bases
    }


def table(
    rows: Sequence[Row],
    others: Sequence[Sequence[Row]],
    base: str | Sequence[str],
    unit: str = "seconds",
    columns: Sequence[str] = (),
) -> str:
    """A table per ``part`` of the rows: a row per case, with a column per candidate; or, with
    ``columns``, a row per case and candidate. Then the rows' ``note`` and ``error``.

    Args:
        rows: of the machine that the table is about.
        others: of other machines: the table has the range of each ratio over all.
        base: the candidate that the others are compared with; or several, of which the first that
            a case has counts.
        unit: of the figures, unless a row has its own: ``'seconds'`` or ``'bytes'``.
        columns: further fields of rows to show.
    """
    measured = [row for row in rows if "median" in row]
    ratios, machines = speed_ups(rows, base), [speed_ups(each, base) for each in (rows, *others)]
    header = ["case", "candidate", "median", "BASE / it"]
    header += [f"on {sum(map(bool, machines))} machines", *columns]
    parts: dict[str, list[list[str]]] = {}
    for row in measured:
        text = duration if row.get("unit", unit) == "seconds" else size
        key = row.get("part"), row["case"], row["candidate"]
        line = [*key[1:], text(row["median"])]
        line.append(f"{ratios[key]:.2f}" if key in ratios else "")
        found = [each[key] for each in machines if key in each]
        line.append("" if set(found) == {1.0} else between(found))
        line += [f"{row[name]:{FORMATS.get(name, '')}}" if name in row else "" for name in columns]
        parts.setdefault(row.get("part", ""), []).append(line)
    texts, bases = [], [base] if isinstance(base, str) else base
    for part, lines in parts.items():
        present = [name for name in bases if any(line[1] == name for line in lines)]
        header[3] = f"{' or '.join(present)} / it"
        if columns:
            kept = [i for i in range(len(header)) if i < 3 or any(line[i] for line in lines)]
            body = markdown([header[i] for i in kept], [[line[i] for i in kept] for line in lines])
        else:
            ranges = f"; the range {header[4]}" * any(line[4] for line in lines)
            told = f"In brackets: {header[3]}{ranges}.\n\n" * any(line[3] for line in lines)
            body = told + by_case(lines)
        texts += [f"**{part}**", body, *means(part, ratios)] if part else [body]
    return "\n\n".join([*texts, *(row["note"] for row in rows if "note" in row)]) + errors(rows)


def by_case(lines: Sequence[list[str]]) -> str:
    """The lines of a table, with a row per case and a column per candidate."""
    names = list(dict.fromkeys(line[1] for line in lines))
    cells = {
        (case, name): text + f" ({'; '.join(filter(None, of))})" * any(of)
        for case, name, text, *of in lines
    }
    cases = dict.fromkeys(line[0] for line in lines)
    told = [[case, *(cells.get((case, name), "") for name in names)] for case in cases]
    return markdown(["case", *names], told)


def means(part: str, ratios: Mapping[tuple[Any, ...], float]) -> list[str]:
    """The geometric means of a part's ratios, by candidate, if they are several."""
    found: dict[str, list[float]] = {}
    for (of, _, candidate), ratio in ratios.items():
        if of == part:
            found.setdefault(candidate, []).append(ratio)
    told = [
        f"{candidate} {statistics.geometric_mean(each):.2f} (least {min(each):.2f})"
        for candidate, each in found.items()
        if len(each) > 1 and set(each) != {1.0}
    ]
    return [f"Geometric means of the ratios: {'; '.join(told)}."] if told else []


def errors(rows: Sequence[Row]) -> str:
    """Markdown lines about the cases that failed; empty if none failed."""
    lines = [
        f"* {', '.join(str(row[key]) for key in ('part', 'case') if key in row)}: {row['error']}"
        for row in rows
        if "error" in row
    ]
    return "\n\nFailed:\n\n" + "\n".join(lines) if lines else ""


@contextlib.contextmanager
def svg(path: Path, count: int) -> Iterator[Any]:
    """``count`` axes side by side, under the name of the machine of the result file beside
    ``path``, an SVG file that is identical for the same data."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "pipekernels", "svg.fonttype": "none"}
    from matplotlib import pyplot

    size = 5.5 * count, 4.5  # Inches.
    figure, axes = pyplot.subplots(1, count, figsize=size, sharey=True, squeeze=False)
    record = records.read(path.with_suffix(".json"))
    figure.suptitle(f"{records.common_name(record['machine'])}, {record['machine']['cores']} cores")
    yield axes[0]
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(
        drawn, format="svg", metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"])
    )
    pyplot.close(figure)
    # A tenth of a point is enough, and neither points nor indents need space.
    short = re.sub(r"(\d\.\d)\d+", r"\1", drawn.getvalue())
    path.write_text(re.sub(r" ?\n(?=[LMCQz])", " ", re.sub(r"\n +", "\n", short)))
