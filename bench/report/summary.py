"""README's tables: what is faster, and what is not, than the strongest of what a user would pick
instead."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench import records
from bench.report.tables import markdown


class Line(NamedTuple):
    """What is measured: a row of a table."""

    work: str
    name: str  # Of the benchmark.
    page: str  # That has all of it, in docs/benchmarks.
    where: Mapping[str, Any]  # Fields of the rows of this work in result files.
    ours: str  # The candidate that is this package.
    instead: Mapping[str, str]  # What a user would pick: names of README by candidates.


NOTHING = "*No such work has been measured on these machines yet.*"
MOST = {True: 8, False: 5}  # Rows of what is faster, and of what is not.
THREADS = {"two threads": "one process of two threads"}
GLOO = {"Gloo": "Gloo"}
MPI = ("DeepSpeed", "MPICH", "Open MPI", "Intel MPI")
SUM = {"part": "sizes", "type": "float32"}
TOKEN, PROMPT = {"part": "a token"}, {"part": "a prompt of 512 tokens"}
LLAMA = "1.1 B Llama"
LINES = [
    Line("all-reduce of 64 KiB", "collectives", "collectives", SUM | {"size": 65536}, "ordinary",
         {name: name for name in MPI}),
    Line("all-reduce of 4 MiB", "collectives", "collectives", SUM | {"size": 1 << 22}, "ordinary",
         {name: name for name in MPI}),
    *(Line(f"{text} of 64 KiB", "torch_distributed", "collectives", {"case": f"{call}, 64 KiB"},
           "pipekernels", GLOO)
      for text, call in (("`dist.send` and back", "send and back"),
                         ("`dist.all_to_all_single`", "all_to_all_single"))),
    *(Line(f"{text} step, 6 MLPs of width 512", "steps", "collectives",
           {"case": f"{kind}, width 512"}, "pipekernels", GLOO)
      for text, kind in (("FSDP", "FSDP2"), ("DDP", "DDP"))),
    *(Line(f"a token of a {LLAMA} in {bits} bits", "decode", "tensor_parallel",
           TOKEN | {"case": f"1.1 B, int{bits}"}, f"pipekernels, int{bits}, compiled",
           {f"llama.cpp, {kind}": "llama.cpp", f"OpenVINO, int{bits}": "OpenVINO",
            "CTranslate2, int8": "CTranslate2"})
      for bits, kind in ((4, "q4_0"), (8, "q8_0"))),
    Line(f"a token of a {LLAMA} in bfloat16", "decode", "tensor_parallel",
         TOKEN | {"case": "1.1 B, bfloat16"}, "pipekernels, compiled",
         THREADS | {"llama.cpp, bf16": "llama.cpp"}),
    Line(f"a prompt of 512 tokens, {LLAMA} in 8 bits", "decode", "tensor_parallel",
         PROMPT | {"case": "1.1 B, int8"}, "pipekernels, int8, compiled",
         {"llama.cpp, q8_0": "llama.cpp", "OpenVINO, int8": "OpenVINO",
          "CTranslate2, int8": "CTranslate2"}),
    Line(f"16 requests at once, {LLAMA} in 8 bits", "serve", "tensor_parallel",
         {"case": "int8, 16 at once"}, "pipekernels, int8",
         {"transformers": "transformers' server", "llama.cpp, q8_0": "llama.cpp's server"}),
    Line("MLP on 16 rows", "tensor_parallel", "tensor_parallel", {"case": "16 rows, forward"},
         "pipekernels", THREADS | {"DTensor, Gloo": "DTensor on Gloo"}),
    Line("memory of a GPT's step, 2 stages in one process", "memory", "pipes",
         {"case": "gpt, 8 chunks"}, "1f1b", {"accumulated": "gradient accumulation"}),
    Line("a GPT's step, 2 stages in processes", "train_step", "pipes", {"case": "gpt, 8 chunks"},
         "pipekernels", {"accumulated": "one process of two threads", "Gloo": "Gloo"}),
]  # fmt: skip


def ratios() -> list[dict[str, dict[str, float]]]:
    """For each of LINES, by candidate of others and by machine: its median over ours. Machines that
    have run fewer than half of the lines with a result are left out."""
    found: list[dict[str, dict[str, float]]] = []
    for line in LINES:
        by_peer: dict[str, dict[str, float]] = {}
        for record in records.load(line.name):
            medians = {
                row["candidate"]: row["median"]
                for row in record["rows"]
                if all(row.get(key) == value for key, value in line.where.items())
            }
            if line.ours not in medians:
                continue
            for peer in filter(medians.__contains__, line.instead):
                machine = records.machine_name(record["machine"])
                by_peer.setdefault(peer, {})[machine] = medians[peer] / medians[line.ours]
        found.append(by_peer)
    measured = [{machine for peer in each.values() for machine in peer} for each in found]
    lines = Counter(machine for machines in measured for machine in machines)
    kept = {name for name in lines if 2 * lines[name] >= sum(map(bool, measured))}
    return [
        {peer: of for peer, by in each.items() if (of := {m: by[m] for m in by if m in kept})}
        for each in found
    ]


def table(*, won: bool) -> str:
    """What is ahead of the strongest peer, or, the slowest first, what is not: medians over the
    machines, in two digits."""
    rows: list[tuple[float, list[str]]] = []
    for line, by_peer in zip(LINES, ratios(), strict=True):
        if by_peer:
            medians = {peer: statistics.median(by.values()) for peer, by in by_peer.items()}
            peer = min(medians, key=medians.__getitem__)
            text = digits(medians[peer])
            if won == (float(text) > 1):
                link = f"[{text}](docs/benchmarks/{line.page}.md)"
                rows.append((medians[peer], [line.work, line.instead[peer], link]))
    if not won:
        rows.sort(key=lambda row: row[0])
    cells = [cells for _, cells in rows[: MOST[won]]]
    return markdown(["work", "instead of", "ratio"], cells) if cells else NOTHING


def digits(figure: float) -> str:
    """Two significant digits, or a whole number."""
    return f"{figure:.0f}" if figure >= 9.95 else f"{figure:#.2g}"


def machines() -> str:
    """What the tables are about."""
    names = sorted({name for each in ratios() for by in each.values() for name in by})
    every = [record["machine"] for line in LINES for record in records.load(line.name)]
    known = {records.machine_name(machine): records.common_name(machine) for machine in every}
    return f"Measured on 2 cores of {', '.join(known[name] for name in names)}."


PARTS: dict[str, Callable[[], str]] = {
    "wins": lambda: f"{table(won=True)}\n\n{machines()}",
    "losses": lambda: table(won=False),
}
