"""The sharded GEMM against cuBLAS, and its overlap with the all-reduce, for layers of Llama models.

* Products: forward, the gradients of input and weight of o_proj (k = hidden / degree) and down_proj
  (k = inner / degree), by ``ops.sharded_gemm``. Device time; copies of the operands that exceed the
  L2 cache are used in turn. Errors are relative to float64, in the norm, of sampled rows and
  columns.
* Overlap: two ranks on one GPU, which are threads, run ``row_linear``; the all-reduce has so few
  thread blocks that it is about as slow as a link. The result is the time of both together relative
  to the slower of the two.

First the tuner measures for a while, so that ``auto`` has measurements of this GPU. Its table is
saved beside the results, under its name in ``pipekernels/kernels/tables``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import harness
from bench.gpu.all_reduce import Threads
from bench.gpu.timing import Row, attempt, call_seconds, compare, errors
from bench.report.tables import duration, markdown, svg
from pipekernels import ops
from pipekernels.kernels import table as tables
from pipekernels.local_ops.gemm_choice import has_triton
from pipekernels.tensor_parallel import overlap
from pipekernels.tensor_parallel.functional import row_linear

MODELS = {"Llama-7B": (4096, 11008), "Llama-70B": (8192, 28672)}  # hidden and inner features
DEGREES = (8, 1, 4, 2)
TOKENS = (4096, 16, 1, 1024, 256, 16384, 64)
TINY_MODELS = {"tiny": (32, 64)}
TINY_TOKENS = (3,)
KIND = torch.bfloat16
ALGORITHMS = ("auto", "triton", "cublas")
CACHED = 128 << 20  # bytes of operands that no cache holds
COPIES = 64  # of the operands, at most
SAMPLED = 64  # rows and columns whose errors are computed
OVERLAP_RANKS = 2
OVERLAP_TOKENS = (2048, 8192)
# Of the time there is.
TUNING, PRODUCTS = 0.5, 0.8
CONDITIONS = {
    "dtype": "bfloat16, random operands",
    "products": "device time, candidates in turn, medians; operands not in the cache",
    "overlap": f"{OVERLAP_RANKS} ranks on one GPU, so that each has half of it; no link between "
    "them",
}


class Product(NamedTuple):
    """One product of a layer, ``[m, k] x [k, n]``.

    Attributes:
        model, layer, degree: which layer, and how many ranks share it.
        way: ``'forward'``, ``'grad_input'`` or ``'grad_weight'``.
        tokens: rows of the layer's input.
        m, n, k: sizes.
    """

    model: str
    layer: str
    degree: int
    way: str
    tokens: int
    m: int
    n: int
    k: int


def by_importance(degrees: tuple[int, ...], tokens: tuple[int, ...]) -> list[tuple[int, int]]:
    """All pairs of a degree and a number of tokens, most important first, as time may be short.

    Two steps in ``tokens`` count as much as one step in ``degrees``.
    """
    pairs = itertools.product(enumerate(degrees), enumerate(tokens))
    ranked = [(2 * i + j, degree, count) for (i, degree), (j, count) in pairs]
    return [(degree, count) for _, degree, count in sorted(ranked, key=lambda pair: pair[0])]


def products(quick: bool) -> Iterator[Product]:
    """All products to measure, most important first."""
    models, all_tokens = (TINY_MODELS, TINY_TOKENS) if quick else (MODELS, TOKENS)
    for degree, tokens in by_importance(DEGREES[:1] if quick else DEGREES, all_tokens):
        for model, (hidden, inner) in models.items():
            for layer, features in (("o_proj", hidden), ("down_proj", inner)):
                part = features // degree
                name = (model, layer, degree)
                yield Product(*name, "forward", tokens, tokens, hidden, part)
                if tokens >= 256 or quick:
                    yield Product(*name, "grad_input", tokens, tokens, part, hidden)
                    yield Product(*name, "grad_weight", tokens, hidden, part, tokens)


def operands(product: Product, device: torch.device, least: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of ``a`` and ``b`` of ``a @ b.T`` in a layer's layout, of ``least`` bytes in all."""

    def make(rows: int, columns: int, transposed: bool) -> Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        data = torch.randn(shape, device=device, dtype=KIND)
        return data.t() if transposed else data

    m, n, k = product.m, product.n, product.k
    count = min(COPIES, max(1, math.ceil(least / (2 * k * (m + n)))))
    return [
        (make(m, k, product.way == "grad_weight"), make(n, k, product.way != "forward"))
        for _ in range(count)
    ]


def measure(product: Product, args: argparse.Namespace) -> Row:
    """Times by algorithm, and errors."""
    device = args.device
    pairs = operands(product, device, 0 if args.quick else CACHED)
    algorithms = [name for name in ALGORITHMS if name != "triton" or device.type == "cuda"]

    def run(algorithm: str) -> Callable[[], Any]:
        turn = itertools.cycle(pairs)

        def work() -> None:
            a, b = next(turn)
            ops.sharded_gemm(a, b, algorithm=algorithm)

        return work

    found = compare({name: run(name) for name in algorithms}, device, rounds=2 if args.quick else 9)
    rate = 2e-12 * product.m * product.n * product.k
    return {
        "ways": found,
        "TFLOP/s": {name: rate / figures["median"] for name, figures in found.items()},
        "errors": relative_errors(*pairs[0], algorithms),
    }


def relative_errors(a: Tensor, b: Tensor, algorithms: list[str]) -> dict[str, float]:
    """Of each algorithm's result, relative to float64, in the same sample."""
    rows = torch.randint(len(a), (min(SAMPLED, len(a)),), device=a.device)
    columns = torch.randint(len(b), (min(SAMPLED, len(b)),), device=a.device)
    exact = a[rows].double() @ b[columns].double().t()

    def error(result: Tensor) -> float:
        return float((result[rows][:, columns].double() - exact).norm() / exact.norm())

    return {name: error(ops.sharded_gemm(a, b, algorithm=name)) for name in algorithms}


# ---- the overlap ----


class SharedLayer:
    """A row-parallel layer of thread ranks, and the parts of its forward.

    Args:
        threads: the ranks.
        tokens, in_features, out_features: of a rank's product.

    Attributes:
        blocks: thread blocks of the all-reduce during the product; None on a CPU, without overlap.
    """

    def __init__(self, threads: Threads, tokens: int, in_features: int, out_features: int) -> None:
        device, ranks = threads.device, threads.ranks
        self.blocks: int | None = None
        self._communicators = threads.communicators
        self._tokens = tokens
        self._xs, self._weights = (
            [torch.randn(rows, in_features, device=device, dtype=KIND) for _ in range(ranks)]
            for rows in (tokens, out_features)
        )
        self._sums = threads.symmetric((tokens, out_features), KIND)
        self._ready = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(ranks)]
        self._beside: list[torch.cuda.Stream | None] = [None] * ranks
        if device.type == "cuda":
            self.blocks = overlap.REDUCING_BLOCKS
            self._beside = [torch.cuda.Stream(device, priority=-1) for _ in range(ranks)]

    def ways(self) -> dict[str, Callable[[int], Any]]:
        """The candidates to time, by name; each takes a rank."""
        return {
            "product": self.product,
            "all-reduce": self.reduce,
            "one after the other": functools.partial(self.forward, "triton"),
            "overlapped": functools.partial(self.forward, "overlapped"),
            "product beside an all-reduce": self.slowed,
        }

    def product(self, rank: int) -> None:
        """Only the product."""
        ops.sharded_gemm(self._xs[rank], self._weights[rank], algorithm=self._on_gpu("triton"))

    def reduce(self, rank: int) -> None:
        """Only the all-reduce, by as many thread blocks as during the product."""
        communicator, tensor = self._communicators[rank], self._sums[rank]
        if self.blocks is None:
            communicator.all_reduce(tensor)
        else:  # all rows of one block, complete from the start
            communicator.all_reduce_when_ready(
                tensor, self._ready[rank], 0, self._tokens, blocks=self.blocks
            )

    def forward(self, algorithm: str, rank: int) -> Tensor:
        """Product and all-reduce, by ``algorithm``."""
        return row_linear(
            self._xs[rank],
            self._weights[rank],
            self._communicators[rank],
            algorithm=self._on_gpu(algorithm),
        )

    def slowed(self, rank: int) -> None:
        """The product during an unrelated all-reduce."""
        with torch.cuda.stream(self._beside[rank]):
            self.reduce(rank)
        self.product(rank)

    def _on_gpu(self, algorithm: str) -> str:
        return "auto" if self.blocks is None else algorithm


def overlapped(tokens: int, args: argparse.Namespace) -> Row:
    """Times of a layer on thread ranks: product, all-reduce, both in sequence, and overlapped."""
    hidden, inner = next(reversed((TINY_MODELS if args.quick else MODELS).values()))
    repeat, rounds = (2, 2) if args.quick else (10, 7)
    with contextlib.closing(Threads(OVERLAP_RANKS, args.device)) as threads:
        layer = SharedLayer(threads, tokens, inner // 8, hidden)
        ways = layer.ways()

        def runner(way: Callable[[int], Any]) -> Callable[[], float]:
            def body(rank: int) -> None:
                for _ in range(repeat):
                    way(rank)

            return lambda: call_seconds(lambda: threads.run(body), args.device) / repeat

        turns = {name: runner(way) for name, way in ways.items()}
        samples = harness.alternate(turns, warmup=1, rounds=rounds)
        one, other = (threads.run(ways[name]) for name in ("one after the other", "overlapped"))
        wrong = sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))
    found = {name: harness.summary(times) for name, times in samples.items()}
    medians = {name: figures["median"] for name, figures in found.items()}
    return {
        "ways": found,
        "reducing blocks": layer.blocks,
        "wrong": wrong,
        "over the slower": medians["overlapped"] / max(medians["product"], medians["all-reduce"]),
        "slow-down": medians["product beside an all-reduce"] / medians["product"],
    }


# ---- all ----


def tune(seconds: float) -> Row:
    """Measure this GPU for ``seconds``; saves the table in the cache and with the results."""
    from pipekernels.kernels import tuner
    from pipekernels.local_ops.gemm_tuning import by_library

    shapes = itertools.chain.from_iterable(
        tuner.row_parallel_shapes([tokens], [degree])
        for degree, tokens in by_importance(DEGREES, TOKENS)
    )
    report = functools.partial(print, flush=True)
    found = tuner.measure(shapes, by_library, seconds=seconds, report=report)
    path = tables.save(found)
    folder = harness.results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{harness.machine_name({'gpu': found.gpu})}.json").write_text(path.read_text())
    faster = sum(entry.wins for entry in found.entries.values())
    return {"shapes": len(found.entries), "faster": faster, "launch": found.launch_seconds}


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Tuning, then products and the overlap, within ``--seconds``."""
    begin = time.monotonic()
    on_gpu = args.device.type == "cuda"
    if on_gpu and has_triton() and not args.quick:
        yield from attempt({"part": "tuning"}, functools.partial(tune, TUNING * args.seconds))
    left_out = 0
    for product in products(args.quick):
        if time.monotonic() - begin > PRODUCTS * args.seconds:
            left_out += 1
            continue
        case = {"part": "product", **product._asdict()}
        yield from attempt(case, functools.partial(measure, product, args))
    if left_out:
        yield {"part": "left out", "products": left_out}
    # Last, as ranks that wait for each other may hang.
    for tokens in TINY_TOKENS if args.quick else OVERLAP_TOKENS:
        yield from attempt(
            {"part": "overlap", "tokens": tokens}, functools.partial(overlapped, tokens, args)
        )


def table(rows: list[Row]) -> str:
    """Products by layer; means; the overlap."""
    found = [row for row in rows if row["part"] == "product" and "ways" in row]
    parts = [f"**Products, TFLOP/s**\n\n{_products(found)}", _means(found)]
    parts += [
        f"{row['products']} products are left out: there was no time for them."
        for row in rows
        if row["part"] == "left out"
    ]
    parts += [
        f"Tuned: {row['shapes']} shapes, for {row['faster']} of them Triton is taken; a launch "
        f"takes {duration(row['launch'])}."
        for row in rows
        if row["part"] == "tuning" and "shapes" in row
    ]
    parts.append(
        f"**Product and all-reduce, {OVERLAP_RANKS} ranks on one GPU**\n\n"
        + _overlap([row for row in rows if row["part"] == "overlap" and "ways" in row])
    )
    return "\n\n".join(parts) + errors(rows, "part", "model", "layer", "degree", "way", "tokens")


def _products(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        rates, wrong = row["TFLOP/s"], row["errors"]
        line = [str(row[key]) for key in ("model", "layer", "degree", "way", "tokens")]
        line += [f"{rates[name]:.1f}" if name in rates else "" for name in ALGORITHMS]
        line += [_over_cublas(rates, name) for name in ALGORITHMS[:2]]
        lines.append(line + [_over_cublas(wrong, name) for name in ALGORITHMS[:2]])
    header = ["model", "layer", "degree", "product", "tokens", *ALGORITHMS]
    header += [f"{name} / cublas" for name in ALGORITHMS[:2]]
    return markdown([*header, *(f"error of {name} / cublas" for name in ALGORITHMS[:2])], lines)


def _over_cublas(figures: dict[str, float], name: str) -> str:
    return f"{figures[name] / figures['cublas']:.2f}" if name in figures else ""


def _means(rows: list[Row]) -> str:
    """Geometric means of the speed over cuBLAS's."""
    told = []
    for text, chosen in (
        ("256 tokens and more", [row for row in rows if row["tokens"] >= 256]),
        ("fewer", [row for row in rows if row["tokens"] < 256]),
    ):
        for name in ALGORITHMS[:2]:
            ratios = [
                row["TFLOP/s"][name] / row["TFLOP/s"]["cublas"]
                for row in chosen
                if name in row["TFLOP/s"]
            ]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                told.append(f"{name}, {text}: {mean:.2f} (least {min(ratios):.2f})")
    return "Speed over cuBLAS's, geometric means: " + "; ".join(told) + "."


def _overlap(rows: list[Row]) -> str:
    names = ["product", "all-reduce", "one after the other", "overlapped"]
    return markdown(
        [
            "tokens",
            "blocks that reduce",
            *names,
            "over the slower",
            "product's slow-down",
            "#wrong",
        ],
        [
            [
                *(str(row["tokens"]), str(row["reducing blocks"])),
                *(duration(row["ways"][name]["median"]) for name in names),
                *(f"{row['over the slower']:.2f}", f"{row['slow-down']:.2f}", str(row["wrong"])),
            ]
            for row in rows
        ],
    )


def plot(rows: list[Row], path: Path) -> None:
    """Speed over cuBLAS's by tokens, as an SVG file."""
    ways = ("forward", "grad_input", "grad_weight")
    with svg(path, len(ways)) as axes:
        for axis, way in zip(axes, ways, strict=True):
            found = [r for r in rows if r.get("way") == way and "TFLOP/s" in r]
            for index, name in enumerate(ALGORITHMS[:2]):
                points = [
                    (r["tokens"], r["TFLOP/s"][name] / r["TFLOP/s"]["cublas"])
                    for r in found
                    if name in r["TFLOP/s"]
                ]
                if points:
                    axis.scatter(*zip(*points, strict=True), s=12, color=f"C{index}", label=name)
            axis.axhline(1.0, color="gray", linewidth=0.8)
            axis.set(title=way, xlabel="tokens", ylabel="speed over cuBLAS")
            axis.set_xscale("log", base=2)
            if found:
                axis.legend()
