"""README's table: one row per kind of work, each from one result file, beside what a user would
pick instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import RESULTS
from bench.report.tables import duration, markdown


class Line(NamedTuple):
    """A row of the table.

    Attributes:
        work: what is done.
        name: the benchmark; the newest of its result files that has all candidates is taken.
        where: fields of the result file's rows of this work.
        ours: the candidate that is this package.
        instead: the candidates beside it, and how the table calls them.
    """

    work: str
    name: str
    where: Mapping[str, Any]
    ours: str
    instead: Mapping[str, str]


LINES = [
    Line(
        "sum of 64 KiB over 2 ranks",
        "collectives",
        {"part": "sizes", "size": 65536, "type": "float32"},
        "ordinary",
        {name: name for name in ("Gloo", "MPICH", "Open MPI", "Intel MPI", "DeepSpeed")},
    ),
    Line(
        "a token of a 110 M Llama, 2 ranks",
        "decode",
        {"case": "float32"},
        "pipekernels",
        {"two threads": "two threads", "transformers, Gloo": "transformers on Gloo"},
    ),
    Line(
        "DDP step of a 3 M GPT, 2 ranks",
        "ddp",
        {"case": "4 sequences"},
        "DDP, pipekernels",
        {"DDP, Gloo": "Gloo", "two threads": "no DDP but two threads"},
    ),
    Line(
        "MLP on 16 rows, 2 ranks",
        "tensor_parallel",
        {"case": "16 rows, forward"},
        "pipekernels",
        {"two threads": "two threads", "DTensor, Gloo": "DTensor on Gloo"},
    ),
    Line(
        "training step of a GPT, 2 stages",
        "timeline",
        {},
        "pipekernels",
        {"one thread": "one thread", "two threads": "two threads"},
    ),
    Line(
        "forward and backward of 8 wide layers, 2 stages",
        "pipe",
        {"case": "wide"},
        "pipekernels",
        {
            "two threads": "two threads",
            "torch.distributed.pipelining": "torch's pipelining",
            "fairscale": "fairscale",
        },
    ),
]


def table() -> str:
    """The table; a benchmark without a result file has no row yet."""
    rows = []
    for line in LINES:
        for path in sorted(RESULTS.glob(f"*/{line.name}.json"), key=_date, reverse=True):
            seconds = _medians(path, line)
            if {line.ours, *line.instead} <= seconds.keys():
                rows.append(_row(line, seconds, path))
                break
    return markdown(["work", "here", "time of others over ours", "machine"], rows)


def _date(path: Path) -> str:
    return str(json.loads(path.read_text())["date"])


def _medians(path: Path, line: Line) -> dict[str, float]:
    rows = json.loads(path.read_text())["rows"]
    chosen = [row for row in rows if line.where.items() <= row.items()]
    return {row["candidate"]: row["median"] for row in chosen}


def _row(line: Line, seconds: Mapping[str, float], path: Path) -> list[str]:
    ours = seconds[line.ours]
    ratios = [f"{label} {seconds[name] / ours:.3g}" for name, label in line.instead.items()]
    machine = json.loads(path.read_text())["machine"]["cpu"]
    link = path.relative_to(RESULTS.parent.parent).as_posix()
    return [line.work, duration(ours), ", ".join(ratios), f"[{machine}]({link})"]
