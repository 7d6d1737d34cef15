"""The host's time of an eager row-parallel layer on a GPU, on a machine without one.

CPU tensors say that they are on an H200. All that Python does before and after CUDA's own calls
then runs as it is: the layer, the choice of the product, symmetric memory, the checks of the
collective. The product is the CPU's, of so few elements that it takes about as long as its launch.
Launches and queries of the driver are left out: the native communicator reduces nothing, so a sum
is only right on one rank.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from pipekernels import Communicator, RowParallelLinear, _backend
from pipekernels.comm import cuda
from pipekernels.ops import gemm_choice

DEVICE = torch.device("cuda", 0)
FEATURES = 64
ROOT = f"{Path(_backend.__file__).parents[1]}/"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)


class Native:
    """A communicator of the extension, whose collectives do nothing."""

    def __init__(self, core: Any, *_: Any) -> None:
        self._allocate = core.allocate
        self.broken_links, self.has_slow_links = "", False

    def allocate(self, sizes: Any, dtype: int, stream: int) -> Any:
        return self._allocate(sizes, dtype)

    def all_reduce(self, *_: Any) -> None:
        pass

    def check(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self, abort: bool) -> None:
        pass


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """A context in which all tensors say that they are on :data:`DEVICE`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        patch.setattr(torch.Tensor, "device", property(lambda _: DEVICE))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
        patch.setattr(_backend, "require_cuda", lambda device: None)
        patch.setattr(_backend.load(), "CudaCommunicator", Native, raising=False)
        patch.setattr(cuda, "current_raw_stream", lambda index: 0)
        gemm_choice._gpu.cache_clear()
        try:
            yield
        finally:
            gemm_choice._gpu.cache_clear()


def layer_on_gpu(comm: Communicator) -> RowParallelLinear:
    """A layer for :func:`pretended_gpu`; of several ranks, all but this one are pretended too."""
    # The native call returns False for tensors on a GPU.
    comm._all_reduce_tensor = lambda *_: False
    return RowParallelLinear(FEATURES * comm.world_size, FEATURES, comm=comm, dtype=torch.bfloat16)


def python_calls(call: Callable[[], Any]) -> list[str]:
    """The functions of Python that ``call()`` calls, in order: file, line and name. Without
    comprehensions, whose frames depend on Python's version."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS:
            file = code.co_filename.removeprefix(ROOT)
            names.append(f"{file}:{code.co_firstlineno} {code.co_name}")

    gc.disable()  # Finalizers that it calls would be counted.
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names


def is_own(name: str) -> bool:
    """Whether a function that :func:`python_calls` names is one of the package."""
    return name.startswith("pipekernels/")
