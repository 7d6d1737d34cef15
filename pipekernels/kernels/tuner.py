"""Measures the Triton kernel against the vendor's library on the GPU at hand.

For one product at a time the library and the candidates take turns, in several rounds, of which
slow candidates miss most; times are medians. The operands are random, and as many copies of them as
the L2 cache cannot hold are used in turn. The GPU is kept waiting until a round's launches are
queued, so the host's speed does not count. A candidate whose result is wrong, or less accurate than
the library's, is dropped.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from math import ceil
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pipekernels import _cache
from pipekernels._torch_private import occupy_gpu
from pipekernels.kernels.config import Config, candidates, generation
from pipekernels.kernels.launch import Product, launch
from pipekernels.kernels.table import Entry, Shape, Table, shape_class

DEVICE = "cuda"
ROUNDS = 7
TRIALS = 2  # Rounds for all candidates. In the others are those that took up to
NEAR = 1.15  # times as long as the fastest one.
CALLS = 32  # Between two looks at the clock, at most; as many as copies if these are more.
COPIES = 64  # Of the operands, at most.
LAUNCHES = 100
TRIED = 8  # Candidates, the ones that are guessed to be best;
GROUPS = (4, 16)  # the first two of them also with these group_m.
ACCURACY = 1.1  # By how much the error may exceed that of the library.
MODELS = {"Llama-7B": (4096, 11008), "Llama-70B": (8192, 28672)}  # Hidden and inner features.
TOKENS = [2**exponent for exponent in range(15)]
DEGREES = [1, 2, 4, 8]

# Computes the product, to the output that it holds, by the library.
Library = Callable[[Product], None]


class Times(NamedTuple):
    """Seconds of one product.

    Attributes:
        library: of the vendor's library.
        configs: of the fastest configurations whose results are right, in that order.
    """

    library: float
    configs: list[tuple[Config, float]]


def row_parallel_shapes(
    tokens: Iterable[int] = TOKENS, degrees: Iterable[int] = DEGREES, kind: str = "bfloat16"
) -> Iterator[Shape]:
    """The products of row-parallel layers of Llama models, forward, and gradients from 256 tokens
    on.

    The projection out of attention and the second of the MLP, their input features sharded.
    """
    sizes = {(hidden, k) for hidden, inner in MODELS.values() for k in (hidden, inner)}
    for count, degree, (hidden, inner) in itertools.product(tokens, degrees, sorted(sizes)):
        part = inner // degree
        yield Shape(kind, "forward", count, hidden, part)
        if count >= 256 and kind != "float8_e4m3fn":  # Which has no gradients.
            yield Shape(kind, "grad_input", count, part, hidden)
            yield Shape(kind, "grad_weight", hidden, part, count)


def measure(
    shapes: Iterable[Shape], library: Library, *, seconds: float,
    report: Callable[[str], None] = lambda line: None,
) -> Table:  # fmt: skip
    """Measure products on the current GPU, one after another, until the time is up.

    Args:
        shapes: which, the most important ones first. Each stands for its class.
        library: the vendor's, to compare with.
        seconds: after how many no other product is begun.
        report: is given a line for each.
    """
    deadline = time.monotonic() + seconds
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    launching = launch_seconds()
    entries: dict[Shape, Entry] = {}
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        try:
            entry = measure_class(shape, library, launching)
        except RuntimeError as error:  # No memory, say: what was measured is not lost.
            report(f"{shape} is not measured: {str(error).partition(chr(10))[0]}")
            continue
        if entry is not None:
            entries[shape_class(*shape)] = entry
            rate = 2e-12 * shape.m * shape.n * shape.k / entry.seconds
            report(
                f"{shape.kind} {shape.layout} {shape.m} x {shape.n} x {shape.k}: {rate:.0f} "
                f"TFLOP/s, {entry.speedup:.2f} x the library ({entry.config})"
            )
    versions = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }
    return Table(properties.name, _cache.now(), versions, launching, entries)


def measure_class(shape: Shape, library: Library, launching: float) -> Entry | None:
    """The best configuration for ``shape``, and how it does with a quarter fewer tokens as well.

    Returns:
        ``None`` if no configuration gives the right result.
    """
    times = measure_product(shape, library, launching)
    if not times.configs:
        return None
    config, seconds = times.configs[0]
    speedup = times.library / seconds
    by_depth = shape.layout == "grad_weight"
    tokens = shape.k if by_depth else shape.m
    if tokens >= 4:
        fewer = tokens * 3 // 4
        smaller = shape._replace(k=fewer) if by_depth else shape._replace(m=fewer)
        others = measure_product(smaller, library, launching, [config])
        if not others.configs:
            return None
        speedup = min(speedup, others.library / others.configs[0][1])
    return Entry(shape, config, seconds, times.library, speedup)


def measure_product(
    shape: Shape, library: Library, launching: float, configs: list[Config] | None = None
) -> Times:
    """Measure the library and ``configs``, or the candidates there are, on the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    era = generation((properties.major, properties.minor))
    sms = properties.multi_processor_count
    kind, _, m, n, k = shape
    if configs is None:
        configs = candidates(era, kind, m, n, k, sms)[:TRIED]
        whole = [config for config in configs[:2] if config.split_k == 1]
        configs += [config._replace(group_m=group_m) for config in whole for group_m in GROUPS]
    products = _products(shape, 2 * getattr(properties, "L2_cache_size", 64 << 20))

    def run(config: Config) -> Callable[[Product], None]:
        return lambda product: launch(product, config, generation=era, sms=sms)

    library(products[0])
    expected = products[0].out.clone()
    ways = {c: run(c) for c in configs if _is_right(products[0], run(c), expected)}
    calls = max(len(products), min(CALLS, ceil(5e-4 / _least_seconds(products[0]))))
    samples: dict[Config | None, list[float]] = {None: [], **{config: [] for config in ways}}
    for trial in range(ROUNDS):
        if trial == TRIALS and ways:
            limit = NEAR * min(min(samples[config]) for config in ways)
            ways = {config: way for config, way in ways.items() if min(samples[config]) <= limit}
        for config, way in [(None, library), *ways.items()]:
            samples[config].append(_seconds(way, products, calls, launching))
    own = [(config, statistics.median(samples[config])) for config in ways]
    return Times(statistics.median(samples[None]), sorted(own, key=lambda pair: pair[1]))


def launch_seconds() -> float:
    """How long the host takes to launch the kernel."""
    product = _products(Shape("bfloat16", "forward", 16, 64, 128), 0)[0]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    era = generation((properties.major, properties.minor))
    config = candidates(era, "bfloat16", 16, 64, 128, 1)[0]
    samples = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch(product, config, generation=era, sms=1)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def _seconds(
    way: Callable[[Product], None], products: list[Product], calls: int, launching: float
) -> float:
    wait = 1e-4 + 1.5 * calls * launching
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        occupy_gpu(int(2e9 * wait))  # At 2 GHz.
        begin.record()
        for product in itertools.islice(itertools.cycle(products), calls):
            way(product)
        queued_in_time = not begin.query()
        end.record()
        end.synchronize()
        if queued_in_time or wait > 0.1:
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / 1e3 / calls
        wait *= 4


def _products(shape: Shape, least: int) -> list[Product]:
    """The product with as many random operands as take ``least`` bytes, or :data:`COPIES`."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    kind, layout, m, n, k = shape
    dtype = torch.float32 if kind == "tfloat32" else getattr(torch, kind)
    out_dtype = torch.bfloat16 if kind == "float8_e4m3fn" else dtype

    def operand(rows: int, by_columns: bool) -> Tensor:
        size = (k, rows) if by_columns else (rows, k)
        data = torch.randn(size, device=DEVICE, generator=generator).to(dtype)
        return data.t() if by_columns else data

    one = torch.ones(1, device=DEVICE) if kind == "float8_e4m3fn" else None
    size = (m * k + n * k) * dtype.itemsize
    products = []
    for _ in range(min(COPIES, max(1, ceil(least / size)))):
        a, b = operand(m, layout == "grad_weight"), operand(n, layout != "forward")
        out = torch.empty(m, n, dtype=out_dtype, device=DEVICE)
        products.append(Product(kind, a, b, out, scale_a=one, scale_b=one))
    return products


def _least_seconds(product: Product) -> float:
    """A bound for a fast GPU: how many calls make a measurement long enough follows from it."""
    (m, k), n = product.a.shape, product.b.shape[0]
    size = (m * k + n * k) * product.a.itemsize + m * n * product.out.itemsize
    return max(2 * m * n * k / 1e15, size / 4e12, 2e-6)


def _is_right(product: Product, way: Callable[[Product], None], expected: Tensor) -> bool:
    """Whether a way gives the library's result, and in a sample is about as close to float64."""
    product.out.fill_(float("nan"))
    try:
        way(product)
        torch.cuda.synchronize()
    except (triton.runtime.errors.OutOfResources, RuntimeError):
        return False  # Of a smaller GPU of the generation, or what this Triton cannot compile.
    # TF32 has as many bits; and as many are sure where Hopper sums up products of float8. The
    # errors of a float32 sum grow like the square root of its length.
    coarse = product.kind in ("tfloat32", "float8_e4m3fn")
    unit = 2**-10 if coarse else 2**-24 * product.a.shape[1] ** 0.5
    unit = max(unit, torch.finfo(expected.dtype).eps)
    if not (product.out - expected).abs().max() <= 8 * unit * expected.abs().max():  # Nor NaN.
        return False
    rows = torch.randint(len(product.a), (64,), device=DEVICE)
    columns = torch.randint(len(product.b), (512,), device=DEVICE)
    exact = product.a[rows].double() @ product.b[columns].double().t()

    def error(result: Tensor) -> Any:
        return (result[rows][:, columns].double() - exact).norm()

    return bool(error(product.out) <= ACCURACY * error(expected))
