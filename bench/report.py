"""Turns result files into plots beside them, and into the tables of README.md and docs/, between
``<!-- bench:NAME -->`` markers. Those of GPUs, ``gpu.NAME`` and ``nccl``, may have no results yet.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import registry
from bench.harness import RESULTS

UNMEASURED = "*Not measured on any GPU yet.*"
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def render(record: Mapping[str, Any]) -> str:
    """One result file as Markdown: machine, the benchmark's table, and conditions."""
    module = registry.find(record["name"])
    machine = record["machine"]
    gpu, cores, torch = machine.get("gpu"), f"{machine['cores']} cores", f"torch {machine['torch']}"
    where = ", ".join(part for part in (gpu, machine["cpu"], cores, torch) if part)
    how = "; ".join(f"{key}: {value}" for key, value in record["conditions"].items())
    note = f"*{record['date']}, commit {record['commit']}. {how}.*"
    return f"**{where}**\n\n{module.table(record['rows'])}\n\n{note}"


def update(text: str, rendered: Mapping[str, str]) -> str:
    """``text`` with the body of every known marker replaced.

    Raises:
        ValueError: a marker names a benchmark of CPUs without a result file.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        body = rendered.get(name, UNMEASURED if name.startswith(("gpu.", "nccl")) else None)
        if body is None:
            raise ValueError(f"no result file for bench:{name}; run `make bench ARGS={name}`")
        return f"<!-- bench:{name} -->\n{body}\n<!-- /bench -->"

    return re.sub(r"<!-- bench:(\S+) -->\n.*?<!-- /bench -->", replace, text, flags=re.DOTALL)


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


def main() -> None:
    """Rewrite every page, and every plot, from the result files of all machines."""
    from bench import summary  # It formats with the functions above.

    bodies: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        record = json.loads(path.read_text())
        if "rows" not in record:  # what a tuner measured
            continue
        bodies.setdefault(record["name"], []).append(render(record))
        plot = getattr(registry.find(record["name"]), "plot", None)
        if plot is not None:
            plot(record["rows"], path.with_suffix(".svg"))
    rendered = {name: "\n\n".join(parts) for name, parts in bodies.items()}
    rendered["summary"] = summary.table()
    for page in PAGES:
        if page.exists():
            page.write_text(update(page.read_text(), rendered))


if __name__ == "__main__":
    main()
