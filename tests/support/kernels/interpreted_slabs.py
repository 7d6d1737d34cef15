"""Tests of products by slabs in Triton's interpreter; test_slab_gemm.py runs this file.

The interpreter computes bfloat16 incorrectly, so the dtypes are float32 and float16. Its products
of blocks are numpy's, whose bits depend on where in a block an element lies. Tensor cores add the
terms of all elements in one order, and so do the products that stand in for them here.
"""

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from triton.runtime import interpreter

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear
from pipekernels.ops.weights import k_slices
from pipekernels.triton_kernels import launch
from pipekernels.triton_kernels.launch import Product, launch_slabs
from support.kernels.interpreter import skip_unless_it_works
from support.kernels.operands import LAYOUTS, operands
from support.levels import in_gate
from support.ranks import run_threads
from support.reference import gamma

GENERATIONS = [80, 90]  # 80 loads by pointers, 90 by descriptors where slabs and layouts allow it.


def multiply(
    a: Tensor, b: Tensor, slabs: int, generation: int, bias: Tensor | None = None
) -> Tensor:
    out = torch.full((len(a), len(b)), float("nan"))
    precision = str(a.dtype).removeprefix("torch.")
    launch_slabs(Product(precision, a, b, out, bias), slabs, generation=generation)
    return out


skip_unless_it_works(lambda: multiply(torch.ones(1, 16), torch.ones(1, 16), 1, 80))


def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """One term after the other, for all elements of the block."""
    total = d.data
    for k in range(a.data.shape[1]):
        terms = a.data[:, k, None].astype(total.dtype) * b.data[None, k].astype(total.dtype)
        total = total + terms
    return interpreter.TensorHandle(total, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    torch.manual_seed(0)


LOADS = [(80, torch.float32), (90, torch.float32), (90, torch.float16)]


@pytest.mark.parametrize(
    ("layout", "loads", "depth"),  # Columns of a slab: a multiple of blocks, and not.
    in_gate(
        list(zip(LAYOUTS, LOADS, (32, 40, 32), strict=True)),
        itertools.product(LAYOUTS, LOADS, (32, 40)),
    ),
)
def test_slabs_are_the_leaves_of_a_tree(
    layout: str, loads: tuple[int, torch.dtype], depth: int
) -> None:
    generation, dtype = loads
    m, n, k = 9, 40, 8 * depth
    a, b = operands(layout, m, n, k, dtype)
    bias = torch.randn(n).to(dtype)
    whole = multiply(a, b, 8, generation)
    exact, magnitude = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    bound = gamma(depth + 3, torch.finfo(torch.float32).eps / 2) * magnitude
    assert ((whole.double() - exact).abs() <= bound).all()
    assert torch.equal(multiply(a, b, 8, generation, bias), whole + bias)
    for ranks in (2, 8):
        parts = [
            multiply(x, y, 8 // ranks, generation)
            for x, y in zip(a.chunk(ranks, 1), b.chunk(ranks, 1), strict=True)
        ]
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        assert torch.equal(parts[0], whole)
    # Nor do the bits depend on how many rows and columns there are.
    assert torch.equal(multiply(a[5:6], b, 8, generation), whole[5:6])
    assert torch.equal(multiply(a[3:], b[16:], 8, generation), whole[3:, 16:])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_slabs_keep_to_themselves(generation: int) -> None:
    """What is not a number in one slab is not read for the others."""
    a, b = torch.randn(16, 80), torch.randn(16, 80)
    a[:, 40:] = float("nan")
    half = multiply(a[:, :40], b[:, :40], 1, generation)
    assert not half.isnan().any()
    assert multiply(a, b, 2, generation).isnan().all()


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_have_the_same_bits_on_any_number_of_ranks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[torch.Size] = []

    def precision(a: Tensor) -> str:
        shapes.append(a.shape)
        return str(a.dtype).removeprefix("torch.")

    lock = threading.Lock()  # The interpreter runs one kernel at a time.

    def one_at_a_time(*args: Any, **options: Any) -> None:
        with lock:
            launch_slabs(*args, **options)

    monkeypatch.setattr(launch, "launch_slabs", one_at_a_time)
    monkeypatch.setattr(k_slices, "_precision_on_gpu", precision)
    monkeypatch.setattr(k_slices, "gpu_of", lambda device: SimpleNamespace(generation=80))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    up, down = nn.Linear(24, 128).to(dtype), nn.Linear(64, 24).to(dtype)
    x = torch.randn(7, 24).to(dtype)

    def forward(
        up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor], leaf: Tensor
    ) -> Tensor:
        gate, value = up(leaf).chunk(2, -1)
        y = down(gate * value)
        y.float().sum().backward()
        return y.detach()

    def body(comm: Communicator) -> dict[str, Tensor]:
        column = ColumnParallelLinear.from_linear(up, comm, invariant=True, blocks=[64, 64])
        row = RowParallelLinear.from_linear(down, comm, invariant=True)
        leaf = x.clone().requires_grad_()
        found = {"y": forward(column, row, leaf)}
        found["x"] = leaf.grad
        for name, layer in (("up", column), ("down", row)):
            found[f"{name}.weight"] = layer.gather("weight", layer.weight.grad)
        return found

    first = run_threads(1, body)[0]
    assert len(shapes) == 2 + 2 + 1 + 16  # Row: 1 + 2. Column: 1 + 1 + one per slab and block.
    for ranks in (2, 8):
        for found in run_threads(ranks, body):
            for name, value in found.items():
                assert torch.equal(value, first[name]), f"{name} on {ranks} ranks"
    leaf = x.double().requires_grad_()
    expected = {"y": forward(up.double(), down.double(), leaf), "x": leaf.grad}
    expected |= {"up.weight": up.weight.grad, "down.weight": down.weight.grad}
    found = {name: value.double() for name, value in first.items()}
    # Roundings to the dtype, of values around 1, that follow one another.
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * torch.finfo(dtype).eps)
