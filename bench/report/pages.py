"""Turns result files into the tables of README.md and docs/, between ``<!-- bench:NAME -->``
markers, and into the plots that pages show.

A table is about one machine: that of the newest result file. Ratios of the others are in it as
ranges.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import records, registry
from bench.harness import Row
from bench.report import summary
from bench.report.tables import table

UNMEASURED = "*Not measured yet: `make bench ARGS={}`.*"
ON_GPUS = "*Not measured on any GPU yet.*"
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(found: Sequence[Mapping[str, Any]]) -> str:
    """The result files of a benchmark as Markdown: one machine's table, and its conditions."""
    record, *others = found
    text = body(record["name"], record["rows"], [other["rows"] for other in others])
    how = "; ".join(f"{key}: {value}" for key, value in record["conditions"].items())
    note = f"*{record['date']}, commit {record['commit']}. {how}.*"
    if others:
        names = dict.fromkeys(records.common_name(other["machine"]) for other in others)
        note += f"\n\n*Measured on {'; '.join(names)} as well.*"
    return f"**{_machine(record)}**\n\n{text}\n\n{note}"


def body(name: str, rows: list[Row], others: Sequence[list[Row]] = ()) -> str:
    """The table of a benchmark on one machine, with the ranges of ratios over the others."""
    module = registry.find(name)
    if hasattr(module, "table"):
        return str(module.table(rows, others))
    unit, columns = getattr(module, "UNIT", "seconds"), getattr(module, "COLUMNS", ())
    return table(rows, others, module.BASE, unit, columns)


def _machine(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return f"{records.common_name(machine)}, {machine['cores']} cores, torch {machine['torch']}"


def update(text: str, rendered: Mapping[str, str]) -> str:
    """``text`` with the body of every marker replaced, and with the plots of the newest results."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        unmeasured = ON_GPUS if name in registry.GPU else UNMEASURED.format(name)
        body = rendered.get(name, unmeasured)
        return f"<!-- bench:{name} -->\n{body}\n<!-- /bench -->"

    def newest(match: re.Match[str]) -> str:
        machine = records.load(match.group(1))[0]["machine"]
        return f"bench/results/{records.machine_name(machine)}/{match.group(1)}.svg"

    text = re.sub(r"bench/results/[^/\s]+/(\S+)\.svg", newest, text)
    return re.sub(r"<!-- bench:(\S+) -->\n.*?<!-- /bench -->", replace, text, flags=re.DOTALL)


def rewritten() -> dict[Path, str]:
    """Every page, with the tables of the result files of all machines."""
    texts = {page: page.read_text() for page in PAGES}
    names = {name for text in texts.values() for name in re.findall(r"<!-- bench:(\S+) -->", text)}
    rendered = {name: render(found) for name in names if (found := records.load(name))}
    rendered |= {name: make() for name, make in summary.PARTS.items() if name in names}
    return {page: update(text, rendered) for page, text in texts.items()}
