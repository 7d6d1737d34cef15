"""README's table: one row per kind of work, beside what a user would pick instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bench import records
from bench.report.tables import between, duration, markdown


class Line(NamedTuple):
    """A row of the table.

    Attributes:
        work: what is done.
        name: the benchmark; times are of the newest of its result files that has all candidates,
            ratios of all of them.
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
        "direct all-reduce of 64 KiB, 2 ranks",
        "collectives",
        {"part": "sizes", "size": 65536, "type": "float32"},
        "ordinary",
        {name: name for name in ("MPICH", "Open MPI", "Intel MPI", "DeepSpeed")},
    ),
    Line(
        "dist.all_reduce of 64 KiB, 2 ranks",
        "torch_distributed",
        {"case": "all_reduce, 64 KiB"},
        "pipekernels",
        {"Gloo": "Gloo"},
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
        found = records.load(line.name)
        whole = [each for each in found if {line.ours, *line.instead} <= medians(each, line).keys()]
        if whole:
            ratios = ", ".join(
                f"{label} {ratio(found, line, name)}" for name, label in line.instead.items()
            )
            machine = whole[0]["machine"]
            folder = f"bench/results/{records.machine_name(machine)}"
            link = f"[{machine['cpu']}]({folder}/{line.name}.json)"
            rows.append([line.work, duration(medians(whole[0], line)[line.ours]), ratios, link])
    return markdown(["work", "here", "time of others over ours", "machine"], rows)


def ratio(found: list[dict[str, Any]], line: Line, name: str) -> str:
    """The time of ``name`` over ours: its range over all machines that have both."""
    figures = [
        times[name] / times[line.ours]
        for times in (medians(record, line) for record in found)
        if {name, line.ours} <= times.keys()
    ]
    return between(figures, ".3g") or f"{figures[0]:.3g}"


def medians(record: Mapping[str, Any], line: Line) -> dict[str, float]:
    """The medians of a result file's rows of this work, by candidate."""
    chosen = [row for row in record["rows"] if line.where.items() <= row.items()]
    return {row["candidate"]: row["median"] for row in chosen}
