"""Kernels compiled by Triton's own launch, which stops before it loads them. Imports Triton."""

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

from pipekernels.triton_kernels import launch


class Target(CudaDriver):
    """A driver that only names the architecture to compile for."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # Triton caches kernels by device.

    def get_current_stream(self, device: int) -> int:
        return 0


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
