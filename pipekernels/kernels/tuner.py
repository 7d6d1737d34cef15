"""Measures the Triton kernel against the vendor's library on the local GPU.

Times are medians on the device: calls are queued while it waits, so that none of them waits for its
launch, which takes longer than a small product, and operands are out of the L2 cache. All
candidates are timed once; then the library and those near the fastest take turns. The operands are
random. Candidates whose result is wrong, or less accurate than the library's, are dropped.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from pipekernels import _cache
from pipekernels._torch_private import wait_on_gpu
from pipekernels.kernels.config import Config, candidates, generation, variants
from pipekernels.kernels.launch import Product, launch
from pipekernels.kernels.table import Measurement, Shape, Table, shape_class

DEVICE = "cuda"
ROUNDS = 5  # Of the library and the candidates that took at most
NEAR = 1.15  # times as long as the fastest.
CALLS = 10  # Of a sample,
HEAD_START = 3_000_000  # for which the device waits so many clock cycles first, or longer.
CACHED = 128 << 20  # Bytes that no L2 cache holds.
LAUNCHES = 100
TRIED = 8  # Number of candidates, by estimate;
GROUPS = (4, 16)  # the best two also with these group_m, and with variants of their blocks.
ACCURACY = 1.1  # Largest error, relative to the library's.
MODELS = {"Llama-7B": (4096, 11008), "Llama-70B": (8192, 28672)}  # Hidden and inner features.
TOKENS = [2**exponent for exponent in range(15)]
DEGREES = [1, 2, 4, 8]

Library = Callable[[Product], None]  # Computes product.out by the vendor's library.


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
    entries: dict[Shape, Measurement] = {}
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        try:
            entry = measure_class(shape, library)
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
    return Table(torch.cuda.get_device_name(), _cache.now(), versions, launch_seconds(), entries)


def measure_class(shape: Shape, library: Library) -> Measurement | None:
    """The best configuration for ``shape``, also measured with a quarter fewer tokens; ``None`` if
    no candidate gives a correct result."""
    seconds = measure_product(shape, library)
    vendor_seconds = seconds.pop(None)
    if not seconds:
        return None
    config = min(seconds, key=seconds.__getitem__)
    assert config is not None
    speedup = vendor_seconds / seconds[config]
    tokens = "k" if shape.layout == "grad_weight" else "m"
    count = getattr(shape, tokens)
    if count >= 4:
        fewer = measure_product(shape._replace(**{tokens: count * 3 // 4}), library, [config])
        if config not in fewer:
            return None
        speedup = min(speedup, fewer[None] / fewer[config])
    return Measurement(shape, config, seconds[config], vendor_seconds, speedup)


def measure_product(
    shape: Shape, library: Library, configs: list[Config] | None = None
) -> dict[Config | None, float]:
    """Seconds on the current GPU of ``configs``, or else of the best candidates, and of the
    library: at ``None``. Those far from the fastest, or whose result is wrong, are left out."""
    gpu_generation, sms = _gpu()
    product = random_product(shape)
    library(product)
    expected = product.out.clone()

    def run(config: Config | None) -> None:
        if config is None:
            library(product)
        else:
            launch(product, config, generation=gpu_generation, sms=sms)

    cache = torch.empty(CACHED, dtype=torch.uint8, device=DEVICE)

    def seconds(config: Config | None) -> float:
        return device_seconds(lambda: run(config), cache)

    configs = configs or tried(shape, gpu_generation, sms)
    trial = {
        c: seconds(c) for c in configs if _is_right(product, functools.partial(run, c), expected)
    }
    near = [config for config, each in trial.items() if each <= NEAR * min(trial.values())]
    rounds = [{config: seconds(config) for config in (None, *near)} for _ in range(ROUNDS)]
    return {each: statistics.median(times[each] for times in rounds) for each in rounds[0]}


def device_seconds(call: Callable[[], None], cache: Tensor) -> float:
    """The median time of ``call`` on the device; writes to ``cache``, which evicts its operands."""
    call()
    cycles = HEAD_START
    while True:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
        torch.cuda.synchronize()
        wait_on_gpu(cycles)
        for begin, end in marks:
            cache.zero_()
            begin.record()
            call()
            end.record()
        queued_in_time = not marks[0][0].query()
        torch.cuda.synchronize()
        if queued_in_time or cycles >= 16 * HEAD_START:
            times: list[float] = [begin.elapsed_time(end) for begin, end in marks]
            return statistics.median(times) / 1e3
        cycles *= 2


def tried(shape: Shape, gpu_generation: int, sms: int) -> list[Config]:
    """The configurations to measure for a product."""
    kind, _, m, n, k = shape
    configs = candidates(gpu_generation, kind, m, n, k, sms)[:TRIED]
    for config in configs[:2]:
        if config.split_k == 1:
            configs += [config._replace(group_m=group_m) for group_m in GROUPS]
            others = variants(gpu_generation, kind, config.blocks)
            configs += [config._replace(blocks=blocks) for blocks in others]
    return configs


def random_product(shape: Shape) -> Product:
    """A product with random operands, as the kind and the layout say."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    kind, layout, m, n, k = shape
    dtype = torch.float32 if kind == "tfloat32" else getattr(torch, kind)

    def operand(rows: int, by_columns: bool) -> Tensor:
        size = (k, rows) if by_columns else (rows, k)
        data = torch.randn(size, device=DEVICE, generator=generator).to(dtype)
        return data.t() if by_columns else data

    a, b = operand(m, layout == "grad_weight"), operand(n, layout != "forward")
    if kind != "float8_e4m3fn":
        return Product(kind, a, b, torch.empty(m, n, dtype=dtype, device=DEVICE))
    one, out = torch.ones(1, device=DEVICE), torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
    return Product(kind, a, b, out, scale_a=one, scale_b=one)


def launch_seconds() -> float:
    """The host's time to launch the kernel."""
    product = random_product(Shape("bfloat16", "forward", 16, 64, 128))
    gpu_generation, _ = _gpu()
    config = candidates(gpu_generation, "bfloat16", 16, 64, 128, 1)[0]
    samples = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch(product, config, generation=gpu_generation, sms=1)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def _gpu() -> tuple[int, int]:
    """Generation and multiprocessors of the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return generation((properties.major, properties.minor)), properties.multi_processor_count


def _is_right(product: Product, call: Callable[[], None], expected: Tensor) -> bool:
    """Whether ``call`` gives the library's result, in a sample about as close to float64."""
    product.out.fill_(float("nan"))
    try:
        call()
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
