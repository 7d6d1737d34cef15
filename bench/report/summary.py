"""README's tables: what is won, and what is lost, beside what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from bench import records
from bench.report.tables import duration, markdown


class Line(NamedTuple):
    """A row of a table.

    Attributes:
        work: what is done.
        name: the benchmark, whose result files of all machines are taken.
        where: fields of the result files' rows of this work, or several values of one; the ranges
            are over all its cases.
        ours: the candidate that is this package.
        instead: the candidates beside it, and what the table calls them.
    """

    work: str
    name: str
    where: Mapping[str, Any]
    ours: str
    instead: Mapping[str, str]


LLAMA = {"case": ("float32", "bfloat16")}
DIRECT = {"part": "sizes", "size": 65536, "type": "float32"}
TWO = {"two threads": "two threads"}
DIRECT_PEERS = ("MPICH", "Open MPI", "Intel MPI", "DeepSpeed")
WINS = [
    Line("tokens/s of a 110 M Llama, 2 ranks",
         "decode", LLAMA, "pipekernels",
         {**TWO, "transformers, Gloo": "transformers' own plan on Gloo"}),
    Line("the same, transformers' own plan on this backend",
         "decode", LLAMA, "transformers, backend pipekernels", {"transformers, Gloo": "on Gloo"}),
    Line("an MLP on 16 rows, 2 ranks",
         "tensor_parallel", {"case": "16 rows, forward"}, "pipekernels",
         {**TWO, "DTensor, Gloo": "DTensor on Gloo"}),
    Line("`dist.all_reduce` of 64 KiB, 2 ranks",
         "torch_distributed", {"case": "all_reduce, 64 KiB"}, "pipekernels", {"Gloo": "Gloo"}),
    Line("a direct all-reduce of 64 KiB, 2 ranks",
         "collectives", DIRECT, "ordinary", {name: name for name in DIRECT_PEERS}),
    Line("a DDP step of a 3 M GPT, 2 ranks", "ddp", {}, "DDP, pipekernels", {"DDP, Gloo": "Gloo"}),
]  # fmt: skip
LOSSES = [
    Line("peak memory of a GPT's training step, 2 stages in a process, 1F1B", "memory", {}, "1f1b",
         {"accumulated": "gradient accumulation over the same micro-batches",
          "unpiped": "the whole batch at once"}),
    Line("a training step of a GPT, 2 stages", "timeline", {}, "pipekernels", TWO),
    Line("forward and backward of 8 wide layers, 2 stages",
         "pipe", {"case": "wide"}, "pipekernels", TWO),
    Line("the same of narrow layers", "pipe", {"case": "narrow"}, "pipekernels", TWO),
    Line("a DDP step of a 3 M GPT, 2 ranks", "ddp", {}, "DDP, pipekernels",
         {"two threads": "one process of two threads"}),
]  # fmt: skip


def table(lines: Iterable[Line]) -> str:
    """The lines as a table; a benchmark without a result file has no row yet."""
    rows = []
    for line in lines:
        found = [each for each in records.load(line.name) if medians(each, line)]
        if found:
            text = "; ".join(
                f"{label} {between(ratios(found, line, name))}"
                for name, label in line.instead.items()
            )
            rows.append([line.work, text, ", ".join(map(_link, found))])
    return markdown(["work", "ratio over", "machines"], rows)


def killed() -> str:
    """How soon survivors name a rank that is killed: the slowest of all runs, by machine."""
    found = records.load("soak")
    rows = [row for record in found for row in record["rows"] if "killed" in row["trial"]]
    low, high = (duration(end(row["max"] for row in rows)) for end in (min, max))
    runs = min(row["runs"] for row in rows)
    files = ", ".join(map(_link, found))
    return (
        f"A rank that is killed is named in an error on all others. The slowest of {runs} such "
        f"errors came after {low} to {high}, depending on the machine ({files})."
    )


def _link(record: Mapping[str, Any]) -> str:
    machine = records.machine_name(record["machine"])
    short = machine.removesuffix("-2c").replace("-family", "").replace("-model-", "-")
    for vendor, name in (("amd-epyc-", "EPYC "), ("intel-r-xeon-r-processor", "Xeon")):
        short = short.replace(vendor, name)
    short = short.replace("Xeon-", "Xeon ")
    return f"[{short}](bench/results/{machine}/{record['name']}.json)"


def between(figures: list[float]) -> str:
    """The range of ratios in two decimals; one, if they are the same."""
    low, high = f"{min(figures):.2f}", f"{max(figures):.2f}"
    return low if low == high else f"{low} to {high}"


def ratios(found: Iterable[Mapping[str, Any]], line: Line, name: str) -> list[float]:
    """What ``name`` takes over what ours takes, in all cases on all machines that have both."""
    return [
        each[name] / each[line.ours]
        for record in found
        for each in medians(record, line)
        if name in each
    ]


def medians(record: Mapping[str, Any], line: Line) -> list[dict[str, float]]:
    """The medians of a result file's rows of this work, by candidate: one dict for each case that
    has ours and another."""
    cases: dict[Any, dict[str, float]] = {}
    for row in record["rows"]:
        fits = all(
            row.get(key) in value if isinstance(value, tuple) else row.get(key) == value
            for key, value in line.where.items()
        )
        if fits and row["candidate"] in {line.ours, *line.instead}:
            cases.setdefault(row.get("case"), {})[row["candidate"]] = row["median"]
    return [each for each in cases.values() if line.ours in each and len(each) > 1]


PARTS: dict[str, Callable[[], str]] = {
    "wins": lambda: table(WINS),
    "losses": lambda: table(LOSSES),
    "killed": killed,
}
