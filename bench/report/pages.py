"""Turns result files into plots beside them, and into the tables of README.md and docs/, between
``<!-- bench:NAME -->`` markers. Those of GPUs, ``gpu.NAME`` and ``nccl``, may have no results yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import registry
from bench.harness import RESULTS
from bench.report import summary

UNMEASURED = "*Not measured on any GPU yet.*"
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def main() -> None:
    """Rewrite every page, and every plot, from the result files of all machines."""
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
