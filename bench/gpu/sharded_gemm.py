"""The sharded GEMM against cuBLAS, and its overlap with the all-reduce, for layers of Llama models.

* Products: forward, the gradients of input and weight of o_proj (k = hidden / degree) and down_proj
  (k = inner / degree), by ``ops.sharded_gemm``. Device time; copies of the operands that exceed the
  L2 cache are used in turn. Errors are relative to float64, in the norm, of sampled rows and
  columns.
* Overlap: two ranks on one GPU, which are threads, run ``row_linear``; the all-reduce has so few
  thread blocks that it is about as slow as a link.

First the tuner measures for a while, so that ``auto`` has measurements of this GPU. Its table is
saved beside the results, under its name in ``pipekernels/kernels/tables``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import records
from bench.gpu.threads import Threads
from bench.harness import Options, Turns
from bench.report.tables import duration
from bench.timing import call_seconds, sampler
from pipekernels import ops
from pipekernels.kernels import table as tables
from pipekernels.local_ops.gemm_choice import has_triton
from pipekernels.tensor_parallel import overlap
from pipekernels.tensor_parallel.functional import row_linear

MODELS = {"Llama-7B": (4096, 11008), "Llama-70B": (8192, 28672)}  # hidden and inner features
TINY_MODELS = {"tiny": (32, 64)}
DEGREES = (8, 1, 4, 2)
TOKENS = (4096, 16, 1, 1024, 256, 16384, 64)
KIND = torch.bfloat16
ALGORITHMS = ("auto", "triton", "cublas")
CACHED = 128 << 20  # bytes of operands that no cache holds
COPIES = 64  # of the operands, at most
SAMPLED = 64  # rows and columns whose errors are computed
OVERLAP_RANKS = 2
TUNING = 0.5  # of the time there is


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

    @property
    def case(self) -> str:
        """What it is called."""
        layer = f"{self.model} {self.layer} / {self.degree}"
        return f"product, {layer}, {self.way}, {self.tokens} tokens"


def by_importance(degrees: tuple[int, ...], tokens: tuple[int, ...]) -> list[tuple[int, int]]:
    """All pairs of a degree and a number of tokens, most important first, as time may be short.

    Two steps in ``tokens`` count as much as one step in ``degrees``.
    """
    pairs = itertools.product(enumerate(degrees), enumerate(tokens))
    ranked = [(2 * i + j, degree, count) for (i, degree), (j, count) in pairs]
    return [(degree, count) for _, degree, count in sorted(ranked, key=lambda pair: pair[0])]


def products(
    models: dict[str, tuple[int, int]],
    degrees: tuple[int, ...] = DEGREES,
    all_tokens: tuple[int, ...] = TOKENS,
    least: int = 256,
) -> dict[str, Product]:
    """All products to measure, most important first; gradients from ``least`` tokens on."""
    found = []
    for degree, tokens in by_importance(degrees, all_tokens):
        for model, (hidden, inner) in models.items():
            for layer, features in (("o_proj", hidden), ("down_proj", inner)):
                part = features // degree
                name = (model, layer, degree)
                found.append(Product(*name, "forward", tokens, tokens, hidden, part))
                if tokens >= least:
                    found.append(Product(*name, "grad_input", tokens, tokens, part, hidden))
                    found.append(Product(*name, "grad_weight", tokens, hidden, part, tokens))
    return {product.case: product for product in found}


PRODUCTS = products(MODELS)
TINY = products(TINY_MODELS, (8,), (3,), 0)
OVERLAP = (
    "product",
    "all-reduce",
    "one after the other",
    "overlapped",
    "product, all-reduce beside",
)
# Overlaps are last, as ranks that wait for each other may hang.
GPU = dict.fromkeys(PRODUCTS, ALGORITHMS) | {
    f"row_linear, {tokens} tokens": OVERLAP for tokens in (2048, 8192)
}
GPU_QUICK = dict.fromkeys(TINY, ALGORITHMS) | {"row_linear, 3 tokens": OVERLAP}
SHARES = {"product": 0.8}  # of the time there is
BASE = ("cublas", "one after the other")
COLUMNS = ("TFLOP/s", "error / cublas", "blocks", "wrong")
WIDE = "gpu."  # Results of that name have a row per case.
CONDITIONS = {
    "dtype": "bfloat16, random operands",
    "products": "device time, candidates in turn, medians; operands not in the cache",
    "overlap": f"{OVERLAP_RANKS} ranks on one GPU, so that each has half of it; no link between "
    "them; blocks: those that reduce",
}


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


def of_product(product: Product, names: Sequence[str], options: Options) -> Turns:
    """Times by algorithm, and errors."""
    device = options.device
    pairs = operands(product, device, 0 if options.quick else CACHED)
    algorithms = [name for name in names if name != "triton" or device.type == "cuda"]

    def run(algorithm: str) -> Callable[[], float]:
        turn = itertools.cycle(pairs)
        return sampler(lambda: ops.sharded_gemm(*next(turn), algorithm=algorithm), device)

    def more(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        rate, wrong = 2e-12 * product.m * product.n * product.k, errors(*pairs[0], algorithms)
        return {
            name: {
                "TFLOP/s": rate / medians[name],
                "error / cublas": wrong[name] / (wrong["cublas"] or 1),
            }
            for name in algorithms
        }

    part = "Products of 256 tokens and more" if product.tokens >= 256 else "Products of fewer"
    runners = {name: run(name) for name in algorithms}
    return Turns(runners, 1, 2 if options.quick else 9, more, fields={"part": part})


def errors(a: Tensor, b: Tensor, algorithms: list[str]) -> dict[str, float]:
    """The error of each algorithm's result, relative to float64, in the same sample."""
    rows = torch.randint(len(a), (min(SAMPLED, len(a)),), device=a.device)
    columns = torch.randint(len(b), (min(SAMPLED, len(b)),), device=a.device)
    exact = a[rows].double() @ b[columns].double().t()

    def error(result: Tensor) -> float:
        return float((result[rows][:, columns].double() - exact).norm() / exact.norm())

    return {name: error(ops.sharded_gemm(a, b, algorithm=name)) for name in algorithms}


class SharedLayer:
    """A row-parallel layer of thread ranks, and the parts of its forward.

    Args:
        threads: the ranks.
        tokens, in_features, out_features: of a rank's product.

    Attributes:
        blocks: thread blocks of the all-reduce during the product; None on a CPU, without overlap.
        ways: the candidates, by name; each takes a rank.
    """

    def __init__(self, threads: Threads, tokens: int, in_features: int, out_features: int) -> None:
        device, ranks = threads.device, threads.ranks
        self.blocks: int | None = None
        self._communicators, self._tokens = threads.communicators, tokens
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
        triton, overlapped = ("auto",) * 2 if self.blocks is None else ("triton", "overlapped")
        calls: list[Callable[[int], Any]] = [
            functools.partial(self._product, triton),
            self._reduce,
            functools.partial(self._forward, triton),
            functools.partial(self._forward, overlapped),
            functools.partial(self._slowed, triton),
        ]
        self.ways = dict(zip(OVERLAP, calls, strict=True))

    def _product(self, algorithm: str, rank: int) -> None:
        ops.sharded_gemm(self._xs[rank], self._weights[rank], algorithm=algorithm)

    def _reduce(self, rank: int) -> None:
        """Only the all-reduce, by as many thread blocks as during the product."""
        communicator, tensor = self._communicators[rank], self._sums[rank]
        if self.blocks is None:
            communicator.all_reduce(tensor)
        else:  # all rows of one block, complete from the start
            communicator.all_reduce_when_ready(
                tensor, self._ready[rank], 0, self._tokens, blocks=self.blocks
            )

    def _forward(self, algorithm: str, rank: int) -> Tensor:
        """Product and all-reduce."""
        communicator = self._communicators[rank]
        return row_linear(self._xs[rank], self._weights[rank], communicator, algorithm=algorithm)

    def _slowed(self, algorithm: str, rank: int) -> None:
        """The product during an unrelated all-reduce."""
        with torch.cuda.stream(self._beside[rank]):
            self._reduce(rank)
        self._product(algorithm, rank)


def of_overlap(tokens: int, options: Options) -> Turns:
    """Times of a layer on thread ranks: its parts, both in sequence, and overlapped."""
    hidden, inner = TINY_MODELS["tiny"] if options.quick else MODELS["Llama-70B"]
    repeat, rounds = (2, 2) if options.quick else (10, 7)
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(contextlib.closing(Threads(OVERLAP_RANKS, options.device)))
        layer = SharedLayer(threads, tokens, inner // 8, hidden)
        close = stack.pop_all().close

    def runner(way: Callable[[int], Any]) -> Callable[[], float]:
        def body(rank: int) -> None:
            for _ in range(repeat):
                way(rank)

        return lambda: call_seconds(lambda: threads.run(body), options.device) / repeat

    def more(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        one, other = (threads.run(layer.ways[name]) for name in OVERLAP[2:4])
        wrong = sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))
        return {"overlapped": {"wrong": wrong, "blocks": layer.blocks or 0}}

    runners = {name: runner(way) for name, way in layer.ways.items()}
    fields = {"part": f"Product and all-reduce, {OVERLAP_RANKS} ranks on one GPU"}
    return Turns(runners, 1, rounds, more, close, fields)


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """A product, or a layer's overlap."""
    if case.startswith("row_linear"):
        return of_overlap(int(case.split()[1]), options)
    return of_product((PRODUCTS | TINY)[case], names, options)


def before(options: Options) -> list[dict[str, Any]]:
    """Measure this GPU for a while; saves the tuner's table in the cache and with the results."""
    from pipekernels.kernels import tuner
    from pipekernels.local_ops.gemm_tuning import by_library

    if options.device.type != "cuda" or not has_triton() or options.quick:
        return []
    shapes = itertools.chain.from_iterable(
        tuner.row_parallel_shapes([tokens], [degree])
        for degree, tokens in by_importance(DEGREES, TOKENS)
    )
    report = functools.partial(print, flush=True)
    found = tuner.measure(shapes, by_library, seconds=TUNING * options.seconds, report=report)
    path = tables.save(found)
    folder = records.results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{records.machine_name({'gpu': found.gpu})}.json").write_text(path.read_text())
    faster = sum(entry.wins for entry in found.entries.values())
    note = f"Tuned: {len(found.entries)} shapes, for {faster} of them Triton is taken; a launch "
    return [{"note": f"{note}takes {duration(found.launch_seconds)}."}]
