"""Measures the Triton kernel against the vendor's library on the local GPU.

For one product at a time the library and the candidates take turns for several rounds; slow
candidates drop out after the first ones. Times are medians. The operands are random, with enough
copies used in turn to exceed the L2 cache. The GPU is kept busy until a sample's launches are
queued, so that the host's speed does not count. Candidates whose result is wrong, or less accurate
than the library's, are dropped.
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
from pipekernels.kernels.config import Config, candidates, generation, variants
from pipekernels.kernels.launch import Product, launch
from pipekernels.kernels.table import Entry, Shape, Table, shape_class

DEVICE = "cuda"
ROUNDS = 7
TRIALS = 2  # First rounds, with all candidates; later rounds keep those that took at most
NEAR = 1.15  # times as long as the fastest.
CALLS = 32  # Per sample, at most; but at least one per copy of the operands.
COPIES = 64  # Of the operands, at most.
LAUNCHES = 100
TRIED = 8  # Number of candidates, by estimate;
GROUPS = (4, 16)  # the best two also with these group_m, and with variants of their blocks.
ACCURACY = 1.1  # Largest error, relative to the library's.
MODELS = {"Llama-7B": (4096, 11008), "Llama-70B": (8192, 28672)}  # Hidden and inner features.
TOKENS = [2**exponent for exponent in range(15)]
DEGREES = [1, 2, 4, 8]

Library = Callable[[Product], None]  # Computes product.out by the vendor's library.


class Times(NamedTuple):
    """Measured seconds of one product.

    Attributes:
        library: of the vendor's library.
        configs: of the candidates with correct results, fastest first.
    """

    library: float
    configs: list[tuple[Config, float]]


def row_parallel_shapes(
    tokens: Iterable[int] = TOKENS, degrees: Iterable[int] = DEGREES, kind: str = "bfloat16"
) -> Iterator[Shape]:
    """The products of row-parallel layers of Llama models: the projection out of attention and the
    second of the MLP; forward, and from 256 tokens on also the gradients."""
    sizes = {(hidden, k) for hidden, inner in MODELS.values() for k in (hidden, inner)}
    for count, degree, (hidden, inner) in itertools.product(tokens, degrees, sorted(sizes)):
        part = inner // degree
        yield Shape(kind, "forward", count, hidden, part)
        if count >= 256 and kind != "float8_e4m3fn":  # float8 products have no gradients.
            yield Shape(kind, "grad_input", count, part, hidden)
            yield Shape(kind, "grad_weight", hidden, part, count)


def measure(
    shapes: Iterable[Shape], library: Library, *, seconds: float,
    report: Callable[[str], None] = lambda line: None,
) -> Table:  # fmt: skip
    """Measure products on the current GPU, one after another, until the time is up.

    Args:
        shapes: the products, most important first. Each represents its class.
        library: the vendor's, to compare with.
        seconds: time after which no further product is started.
        report: called with a line for each product.
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
        except RuntimeError as error:  # For example out of memory: keep what was measured.
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
    """The best configuration for ``shape``, also measured with a quarter fewer tokens; ``None`` if
    no candidate gives a correct result."""
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
    """Measure the library and ``configs``, or else the best candidates, on the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu_generation = generation((properties.major, properties.minor))
    sms = properties.multi_processor_count
    kind, _, m, n, k = shape
    if configs is None:
        configs = candidates(gpu_generation, kind, m, n, k, sms)[:TRIED]
        whole = [config for config in configs[:2] if config.split_k == 1]
        configs += [config._replace(group_m=group_m) for config in whole for group_m in GROUPS]
        configs += [
            config._replace(blocks=blocks)
            for config in whole
            for blocks in variants(gpu_generation, kind, config.blocks)
        ]
    products = _products(shape, 2 * getattr(properties, "L2_cache_size", 64 << 20))

    def run(config: Config) -> Callable[[Product], None]:
        return lambda product: launch(product, config, generation=gpu_generation, sms=sms)

    library(products[0])
    expected = products[0].out.clone()
    runs = {c: run(c) for c in configs if _is_right(products[0], run(c), expected)}
    calls = max(len(products), min(CALLS, ceil(5e-4 / _least_seconds(products[0]))))
    samples: dict[Config | None, list[float]] = {None: [], **{config: [] for config in runs}}
    for trial in range(ROUNDS):
        if trial == TRIALS and runs:
            limit = NEAR * min(min(samples[config]) for config in runs)
            runs = {config: call for config, call in runs.items() if min(samples[config]) <= limit}
        for config, call in [(None, library), *runs.items()]:
            samples[config].append(_seconds(call, products, calls, launching))
    own = [(config, statistics.median(samples[config])) for config in runs]
    return Times(statistics.median(samples[None]), sorted(own, key=lambda pair: pair[1]))


def launch_seconds() -> float:
    """The host's time to launch the kernel."""
    product = _products(Shape("bfloat16", "forward", 16, 64, 128), 0)[0]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu_generation = generation((properties.major, properties.minor))
    config = candidates(gpu_generation, "bfloat16", 16, 64, 128, 1)[0]
    samples = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch(product, config, generation=gpu_generation, sms=1)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def _seconds(
    call: Callable[[Product], None], products: list[Product], calls: int, launching: float
) -> float:
    """The GPU's time per call; ``launching`` is the host's."""
    wait = 1e-4 + 1.5 * calls * launching
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        occupy_gpu(int(2e9 * wait))  # At 2 GHz.
        begin.record()
        for product in itertools.islice(itertools.cycle(products), calls):
            call(product)
        queued_in_time = not begin.query()
        end.record()
        end.synchronize()
        if queued_in_time or wait > 0.1:
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / 1e3 / calls
        wait *= 4


def _products(shape: Shape, least: int) -> list[Product]:
    """Copies of a product with random operands of ``least`` bytes in all, up to :data:`COPIES`."""
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
    """Lower bound on a product's time on a fast GPU, to choose the number of calls per sample."""
    (m, k), n = product.a.shape, product.b.shape[0]
    size = (m * k + n * k) * product.a.itemsize + m * n * product.out.itemsize
    return max(2 * m * n * k / 1e15, size / 4e12, 2e-6)


def _is_right(product: Product, call: Callable[[Product], None], expected: Tensor) -> bool:
    """Whether ``call`` gives the library's result, in a sample about as close to float64."""
    product.out.fill_(float("nan"))
    try:
        call(product)
        torch.cuda.synchronize()
    except (triton.runtime.errors.OutOfResources, RuntimeError):
        return False  # This GPU has fewer resources, or this Triton cannot compile the kernel.
    # TF32 has 10 mantissa bits, and Hopper's float8 accumulation keeps at least as many. The error
    # of a float32 sum grows like the square root of its length.
    coarse = product.kind in ("tfloat32", "float8_e4m3fn")
    unit = 2**-10 if coarse else 2**-24 * product.a.shape[1] ** 0.5
    unit = max(unit, torch.finfo(expected.dtype).eps)
    # ``not <=`` also rejects NaN.
    if not (product.out - expected).abs().max() <= 8 * unit * expected.abs().max():
        return False
    rows = torch.randint(len(product.a), (64,), device=DEVICE)
    columns = torch.randint(len(product.b), (512,), device=DEVICE)
    exact = product.a[rows].double() @ product.b[columns].double().t()

    def error(result: Tensor) -> Any:
        return (result[rows][:, columns].double() - exact).norm()

    return bool(error(product.out) <= ACCURACY * error(expected))
