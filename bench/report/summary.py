"""README's tables: what is won, and what is not, beside what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bench import records
from bench.report.tables import between, duration, markdown


class Line(NamedTuple):
    """What is measured: a row of a table for each peer."""

    work: str
    name: str  # Of the benchmark.
    where: Mapping[str, Any]  # Fields of the rows of this work in result files.
    ours: str  # The candidate that is this package.
    instead: Mapping[str, Sequence[str]]  # By peer: its candidates, of which the fastest counts.


TWO = {"two threads": ["two threads"]}
MPI = "the fastest MPI"
OTHERS = {"DeepSpeed": ["DeepSpeed"], MPI: ["MPICH", "Open MPI", "Intel MPI"]}
SUM = {"part": "sizes", "type": "float32"}
DECODERS = {
    "two threads, compiled": ["two threads, compiled"],
    "llama.cpp": ["llama.cpp, f32", "llama.cpp, bf16", "llama.cpp, q8_0"],
    "CTranslate2": ["CTranslate2, float32", "CTranslate2, int8"],
}
COMPILED = {
    "float32": "pipekernels, compiled",
    "bfloat16": "pipekernels, compiled",
    "int8": "pipekernels, int8, compiled",
}
DIRECT = Line("all-reduce of 64 KiB", "collectives", SUM | {"size": 65536}, "ordinary", OTHERS)
LINES = [
    DIRECT,
    Line("all-reduce of 4 MiB", "collectives", SUM | {"size": 1 << 22}, "ordinary", OTHERS),
    Line("all-reduce of 4 KiB, 8 ranks", "collectives", {"part": "crowded"}, "ordinary",
         {MPI: OTHERS[MPI]}),
    Line("`dist.all_reduce` of 64 KiB", "torch_distributed", {"case": "all_reduce, 64 KiB"},
         "pipekernels", {"Gloo": ["Gloo"]}),
    *(Line(f"DDP step of a 3 M GPT, {case}", "ddp", {"case": case}, "DDP, pipekernels",
           {"Gloo": ["DDP, Gloo"], "one process of two threads": ["two threads"]})
      for case in ("4 sequences", "16 sequences")),
    *(Line(f"tokens/s of a 110 M Llama, {case}", "decode", {"case": case}, "pipekernels",
           TWO) for case in ("float32", "bfloat16")),
    *(Line(f"tokens/s of a 110 M Llama by `compile_decoding`, {case}", "decode", {"case": case},
           ours, DECODERS) for case, ours in COMPILED.items()),
    *(Line(f"tokens/s of a 1.1 B Llama by `compile_decoding`, {case}", "decode",
           {"case": f"1.1 B, {case}"}, ours, DECODERS) for case, ours in COMPILED.items()),
    *(Line(f"transformers' own plan on this backend, {case}", "decode", {"case": case},
           "transformers, backend pipekernels", {"the same on Gloo": ["transformers, Gloo"]})
      for case in ("float32", "bfloat16")),
    Line("MLP on 16 rows", "tensor_parallel", {"case": "16 rows, forward"}, "pipekernels",
         TWO | {"DTensor on Gloo": ["DTensor, Gloo"]}),
    *(Line(f"memory of a GPT's step, 2 stages, 1F1B, {count} microbatches", "memory",
           {"case": f"gpt, {count} chunks"}, "1f1b", {"gradient accumulation": ["accumulated"]})
      for count in (4, 8)),
    Line("training step of a GPT, 2 stages", "train_step", {"case": "gpt, 8 chunks"}, "1f1b", TWO),
    *(Line(f"forward and backward of 8 {case} layers, 2 stages", "pipe", {"case": case},
           "pipekernels", TWO) for case in ("wide", "narrow")),
]  # fmt: skip


def table(*, won: bool) -> str:
    """What is ahead of a peer on every machine, or all else, in two digits; a peer that no result
    file has has no row yet."""
    rows: list[tuple[list[str], dict[str, str]]] = []
    for line in LINES:
        for peer, candidates in line.instead.items():
            ratios = {
                records.common_name(record["machine"]): (digits(theirs / ours), record)
                for record in records.load(line.name)
                for ours, theirs in medians(record, line, candidates)
            }
            if ratios and won == all(float(text) > 1 for text, _ in ratios.values()):
                cells = {name: f"[{text}]({_path(of)})" for name, (text, of) in ratios.items()}
                rows.append(([line.work, peer], cells))
    names = dict.fromkeys(name for _, cells in rows for name in cells)
    lines = [[*told, *(cells.get(name, "") for name in names)] for told, cells in rows]
    return markdown(["work", "over", *names], lines)


def first() -> str:
    """The sentence that README begins with."""
    found = {
        peer: [pair for each in records.load(DIRECT.name) for pair in medians(each, DIRECT, names)]
        for peer, names in OTHERS.items()
    }
    ours = between([own * 1e6 for own, _ in found[MPI]], digits)
    theirs = (
        f"{peer} {between([other * 1e6 for _, other in pairs], digits)} us"
        for peer, pairs in found.items()
    )
    return (
        f"**All-reduce of 64 KiB between two processes: {ours} us ({', '.join(theirs)}).** "
        "pipekernels is tensor and pipeline parallelism for PyTorch, over kernels of its own."
    )


def killed() -> str:
    """How soon survivors name a rank that is killed: the slowest of all runs, by machine."""
    found = records.load("soak")
    rows = [row for record in found for row in record["rows"] if "killed" in row["trial"]]
    low, high = (duration(end(row["max"] for row in rows)) for end in (min, max))
    runs = min(row["runs"] for row in rows)
    files = ", ".join(f"[{records.common_name(each['machine'])}]({_path(each)})" for each in found)
    return (
        f"A rank that is killed is named in an error on all others. The slowest of {runs} such "
        f"errors came after {low} to {high}, depending on the machine ({files})."
    )


def _path(record: Mapping[str, Any]) -> str:
    return f"bench/results/{records.machine_name(record['machine'])}/{record['name']}.json"


def digits(figure: float) -> str:
    """Two significant digits, or a whole number."""
    return f"{figure:.0f}" if figure >= 9.95 else f"{figure:#.2g}"


def medians(
    record: Mapping[str, Any], line: Line, candidates: Iterable[str]
) -> list[tuple[float, float]]:
    """Our median of this work in a result file, and that of the fastest of ``candidates``, if it
    has both."""
    found = {
        row["candidate"]: row["median"]
        for row in record["rows"]
        if all(row.get(key) == value for key, value in line.where.items())
    }
    theirs = [found[name] for name in candidates if name in found]
    return [(found[line.ours], min(theirs))] if theirs and line.ours in found else []


PARTS: dict[str, Callable[[], str]] = {
    "first": first,
    "wins": lambda: table(won=True),
    "losses": lambda: table(won=False),
    "killed": killed,
}
