"""Tests that launch the Triton kernels on the driver of tests/support/cuda/stub_driver.c;
test_stub_driver.py runs this file, with that driver in TRITON_LIBCUDA_PATH.

Triton compiles the kernels for GPUs that are not present, and its own launcher passes the arguments
on. The driver checks them, and that addresses lie in tensors of the launch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

from pipekernels.triton_kernels.config import Blocks, Config
from pipekernels.triton_kernels.launch import Product, launch
from pipekernels.triton_kernels.layout import signature
from support.kernels import aot
from support.kernels.recorded import Target, compiled
from support.levels import in_gate

pytestmark = [pytest.mark.compile]

STUB = ctypes.CDLL("libcuda.so.1")
STUB.stub_allow.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
STUB.stub_problem.restype = ctypes.c_char_p


class Driver(Target):
    """The driver of a GPU with this compute capability, which is also its number."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher


@functools.cache
def driver(capability: int) -> Driver:
    return Driver(capability)


class DeviceMemory(TorchDispatchMode):
    """Tensors that are made in it are device memory to the driver."""

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            STUB.stub_allow(storage.data_ptr(), storage.nbytes())
        return result


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    STUB.stub_forget()


def launched(capability: int, body: Callable[[], None]) -> tuple[int, int]:
    """Launches and tensor maps of ``body``."""
    triton.runtime.driver.set_active(driver(capability))
    launches, maps = STUB.stub_launches(), STUB.stub_maps()
    with DeviceMemory():
        body()
    return STUB.stub_launches() - launches, STUB.stub_maps() - maps


# Of bfloat16 every configuration, of other precisions those for many rows.
LAUNCHES = [
    case for case in aot.cases() if case.precision == "bfloat16" or case in aot.for_many_rows()
]


@pytest.mark.parametrize("case", in_gate(aot.gate_cases()[::4], LAUNCHES), ids=str)
def test_configurations(case: aot.Case) -> None:
    launches, maps = launched(case.architecture, lambda: aot._launch(case))
    expected = 0
    if case.generation >= 90 and case.variant != "odd":
        expected = 2 if case.split else 3
    assert (launches, maps) == (1, expected)


@pytest.mark.parametrize(
    "case", in_gate(aot.gate_slab_cases()[::2], aot.slab_cases("installed")), ids=str
)
def test_products_by_slabs(case: aot.SlabCase) -> None:
    by_maps = case.architecture >= 90 and not case.odd
    body = functools.partial(aot._launch_slabs, case)
    assert launched(case.architecture, body) == (1, 2 if by_maps else 0)


SMALL = Config(Blocks(16, 32, 32, 4, 2))


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16)


@pytest.mark.full
@pytest.mark.parametrize("architecture", [80, 90])
def test_equal_signatures_have_the_same_kernel(architecture: int) -> None:
    """Otherwise a kernel could be compiled during the capture of a graph."""
    sizes = [(1, 32, 32), (2, 32, 32), (50, 32, 32), (50, 48, 16), (50, 40, 40), (7, 41, 32)]
    products = [Product("float16", half(m, k), half(n, k), half(m, n)) for m, n, k in sizes]
    products += [each._replace(bias=torch.empty(each.b.shape[0])) for each in products[1:3]]

    def launches() -> None:
        for product in products:
            launch(product, SMALL, generation=architecture, sms=1)

    kernels: dict[Any, set[str]] = {}
    for product, kernel in zip(products, compiled(architecture, launches), strict=True):
        key = tuple(None if t is None else signature(t) for t in product[1:])
        kernels.setdefault(key, set()).add(kernel.hash)
    assert 1 < len(kernels) < len(products)
    assert all(len(same) == 1 for same in kernels.values())
