"""Sharded layers in compiled programs: one operator each, which needs no Python for a few rows."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.ranks import on_ranks, run_threads
from torch import Tensor, nn
from torch.library import opcheck

from pipekernels import (
    ColumnParallelLinear,
    Communicator,
    PeerError,
    RowParallelLinear,
)
from pipekernels.ops.weights import weight_of
from pipekernels.ops.weights.integers import pack_scale, pack_weight, rounded
from pipekernels.tensor_parallel import quantize_weights

registered = torch.ops.pipekernels
IN, OUT = 24, 10


def operands(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, 1, IN), (OUT, IN), (OUT,)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def integer_operands(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x = operands(rows, torch.float32)[0]
    integers = rounded(torch.randn(OUT, IN), 8, None)
    return x, pack_weight(integers.weight, 8), pack_scale(integers.scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 4, 5])
@on_ranks(2, run_threads)
def test_operators_have_the_bits_of_eager_products(
    comm: Communicator, rows: int, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(rows, dtype)
    laid_out = [weight, weight.t().contiguous().t(), weight[:0]]
    for each in laid_out:
        own_bias = bias[: len(each)]
        for added in (None, own_bias):
            y = registered.linear(x, each, None, None, added, len(each))
            own = weight_of(each, len(each), None, None)
            assert torch.equal(y, own.linear(x, added)) and y.is_contiguous()
        y = registered.row_linear(x, each, None, None, len(each), comm.handle, False)
        assert torch.equal(y, own.sum_of_products(x, comm, False))
    negated = registered.linear(
        torch._neg_view(x), weight, None, None, None, OUT
    )  # Has other elements.
    assert torch.equal(negated, registered.linear(-x, weight, None, None, None, OUT))
    # Ranks may compute in different ways.
    y = registered.row_linear(x, laid_out[comm.rank], None, None, OUT, comm.handle, False)
    torch.testing.assert_close(y.double(), 2 * (x.double() @ weight.double().t()), **loose(dtype))


def loose(dtype: torch.dtype) -> dict[str, Any]:
    """Bounds of a sum of IN products of two numbers below 5, doubled, and rounded twice."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 50 * IN * torch.finfo(sums).eps}


@pytest.mark.parametrize("rows", [1, 5])
def test_registration(rows: int) -> None:
    (comm,) = Communicator.threads(1)
    x, weight, bias = operands(rows, torch.float32)
    opcheck(registered.linear, (x, weight, None, None, bias, OUT))
    opcheck(registered.row_linear, (x, weight, None, None, OUT, comm.handle, True))
    x, weight, scale = integer_operands(rows)
    opcheck(registered.linear, (x, weight, scale, None, bias, OUT))
    opcheck(registered.row_linear, (x, weight, scale, None, OUT, comm.handle, False))


@pytest.mark.parametrize("rows", [1, 5])
def test_errors_are_those_of_collectives(rows: int) -> None:
    x, weight, _ = operands(rows, torch.float32)
    first, second = Communicator.threads(2, timeout=0.2)

    def call() -> Tensor:
        result: Tensor = registered.row_linear(x, weight, None, None, OUT, first.handle, False)
        return result

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        registered.linear(x[..., 1:], weight, None, None, None, OUT)
    # In a thread: a process of one thread is told that it needs more.
    late = pytest.raises(TimeoutError, match=r"rank\(s\) 1 of 2 did not arrive at all_reduce")
    with ThreadPoolExecutor(1) as pool, late:
        pool.submit(call).result()
    with pytest.raises(RuntimeError, match="cannot be used after a failure"):
        call()
    first.close()
    with pytest.raises(RuntimeError, match="no communicator has handle"):
        call()
    first, second = Communicator.threads(2)
    aborting = threading.Timer(0.05, second.__exit__, (ValueError, ValueError(), None))
    aborting.start()
    with pytest.raises(PeerError, match="rank 1"):
        call()
    aborting.join()


def programs(layers: Callable[..., Any], x: Tensor) -> tuple[list[str], Tensor]:
    """The operators of the compiled module, as one graph, and its result for ``x``."""
    names: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def note(module: torch.fx.GraphModule, _: Any) -> Any:
            names.extend(str(node.target) for node in module.graph.nodes)
            return make_boxed_func(module.forward)

        return aot_autograd(fw_compiler=note)(module, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend=backend)
    y = compiled(x)
    found = list(names)
    compiled(torch.cat([x] * 3))
    assert names == found  # No recompilation.
    return [name for name in found if "pipekernels" in name or "mm" in name], y


@pytest.mark.compile
def test_a_layer_is_one_operator_for_any_number_of_rows() -> None:
    (comm,) = Communicator.threads(1)
    column = ColumnParallelLinear(IN, OUT, comm=comm)
    row = RowParallelLinear(OUT, IN, comm=comm)
    layers = nn.Sequential(column, nn.GELU(), row)
    x = torch.randn(2, IN)
    expected = ["pipekernels.linear.default", "pipekernels.row_linear.default"]
    with torch.no_grad():
        assert programs(layers, x)[0] == expected
        integers = quantize_weights(copy.deepcopy(layers))
        names, y = programs(integers, x)
        assert names == expected
        torch.testing.assert_close(y, integers(x))
    names, y = programs(layers, x)
    assert "pipekernels.linear.default" not in names  # It has no derivative.
    assert y.requires_grad
