"""``python -m bench.gpu.precompile ARCHITECTURE SMS``: fills Triton's cache for the tuner.

Processes without a CUDA context compile, in parallel, the kernels of all candidates that the tuner
will try for the products of :mod:`bench.gpu.sharded_gemm`. They go through Triton's own launch,
which stops before it loads the kernel; of the GPU its cache key holds the architecture alone, so
that the tuner, on the GPU, finds them. A candidate that does not compile is left to the tuner.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from bench.gpu import sharded_gemm
from pipekernels.kernels import launch, tuner
from pipekernels.kernels.config import Config, generation
from pipekernels.kernels.table import Shape


class Target(DriverBase):
    """A driver that only names the architecture to compile for."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # Triton caches kernels by device.

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise AssertionError("a launch does not ask for that")

    def get_benchmarker(self) -> Any:
        raise AssertionError("a launch does not ask for that")


def compiled(
    architecture: int, launches: Callable[[], None], name: str = "gemm_kernel"
) -> list[Any]:
    """The kernels, of this name, that ``launches()`` would start. Triton compiles them, but starts
    none."""
    found: list[Any] = []

    class Recorder:
        """Replaces the kernel: compiles it for the arguments of a launch."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: found.append(
                kernel.run(*args, grid=grid, warmup=True, **kwargs)
            )

    kernel = getattr(launch, name)
    triton.runtime.driver.set_active(Target(architecture))
    setattr(launch, name, Recorder())
    try:
        launches()
    finally:
        setattr(launch, name, kernel)
    return found


class Job(NamedTuple):
    """A kernel to compile: a product that needs it, and the candidate."""

    shape: Shape
    config: Config


def shapes() -> Iterable[Shape]:
    """The products that :func:`bench.gpu.sharded_gemm.tune` measures, in its order."""
    for degree, tokens in sharded_gemm.by_importance(sharded_gemm.DEGREES, sharded_gemm.TOKENS):
        yield from tuner.row_parallel_shapes([tokens], [degree])


def kernel_of(job: Job) -> tuple[Any, ...]:
    """Equal for jobs with the same kernel: Triton compiles sizes of 1, and rows of multiples of 16
    elements, apart; ``group_m`` and the number of splits are arguments of it."""
    (kind, layout, m, n, k), config = job
    config = config._replace(group_m=1, split_k=min(config.split_k, 2))
    return kind, layout, m == 1, n == 1, k == 1, n % 16 == 0, k % 16 == 0, config


def jobs(products: Iterable[Shape], gpu_generation: int, sms: int) -> list[Job]:
    """One job for each kernel that the tuner will launch, in the order of first use."""
    found: dict[tuple[Any, ...], Job] = {}
    for shape in products:
        for config in tuner.tried(shape, gpu_generation, sms):
            job = Job(shape, config)
            found.setdefault(kernel_of(job), job)
    return list(found.values())


def build(job: Job, architecture: int, sms: int) -> str | None:
    """Compile a job's kernel; returns the reason if that fails."""
    kind, layout, m, n, k = job.shape
    dtype = torch.float32 if kind == "tfloat32" else getattr(torch, kind)

    def operand(rows: int, by_columns: bool) -> Tensor:  # Never touched, so it takes no memory.
        shape = (k, rows) if by_columns else (rows, k)
        data = torch.empty(shape, dtype=dtype)
        return data.t() if by_columns else data

    a, b = operand(m, layout == "grad_weight"), operand(n, layout != "forward")
    product = launch.Product(kind, a, b, torch.empty(m, n, dtype=dtype))
    gpu_generation = generation(divmod(architecture, 10))
    try:
        compiled(
            architecture,
            lambda: launch.launch(product, job.config, generation=gpu_generation, sms=sms),
        )
    except Exception as error:  # noqa: BLE001 - whatever a version of Triton raises
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def main() -> None:
    """Compile all, and print how many there are."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.precompile", description=__doc__)
    parser.add_argument("architecture", type=int, help="of the GPU, such as 90")
    parser.add_argument("sms", type=int, help="its number of multiprocessors")
    args = parser.parse_args()
    pending = jobs(shapes(), generation(divmod(args.architecture, 10)), args.sms)
    # Forked before anything uses CUDA or threads: a process is there at once.
    context = multiprocessing.get_context("fork")
    workers = max(1, len(os.sched_getaffinity(0)) // 2)
    with ProcessPoolExecutor(workers, context, initializer=os.nice, initargs=(10,)) as pool:
        always = itertools.repeat
        reasons = pool.map(build, pending, always(args.architecture), always(args.sms))
        failed = 0
        for job, reason in zip(pending, reasons, strict=True):
            if reason is not None:
                failed += 1
                print(f"{job}: {reason}", flush=True)
    version = triton.__version__
    print(f"note: {len(pending)} kernels for Triton {version}, {failed} do not compile")


if __name__ == "__main__":
    main()
