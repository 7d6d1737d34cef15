"""Row- and column-parallel linear layers compared with nn.Linear: values and gradients."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.checks import assert_full_gradients
from support.ranks import on, run_processes, run_threads
from support.reference import gamma
from torch import Tensor, nn

from pipekernels import (
    CollectiveBarrier,
    ColumnParallelLinear,
    Communicator,
    RowParallelLinear,
)
from pipekernels.tensor_parallel.functional import reduce_from_ranks

WORLD_SIZES = [1, 2, 3, 4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# No world size but 1 divides 13 or 7. All divide the rows, as reduce_scatter requires.
IN, OUT, ROWS = 13, 7, 12


def assert_within_bound(value: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> None:
    """Compare a sharded product with one in float64.

    Error model: a product accumulates ``terms`` terms over all ranks, in at least float32 (float64
    for float64), and is rounded to its dtype at most three times: each rank's partial sum, the sum
    over ranks, and the sum with the bias. ``exact`` itself has rounding errors of float64.
    """
    unit = torch.finfo(value.dtype).eps / 2
    accumulator = min(unit, torch.finfo(torch.float32).eps / 2)
    double = torch.finfo(torch.float64).eps / 2
    relative = gamma(terms, accumulator) + gamma(3, unit) + gamma(terms + 1, double)
    assert value.shape == exact.shape
    excess = (value.double() - exact).abs() - relative * magnitude
    assert (excess <= 0).all(), f"error exceeds its bound by {excess.max():.3e}"


class Case:
    """A full linear layer, an input and an output gradient, and what they give in float64."""

    def __init__(
        self,
        dtype: torch.dtype,
        bias: bool = True,
        shape: tuple[int, ...] = (ROWS,),
        device: torch.device | str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(IN, OUT, bias, dtype=dtype).to(device)
        self.x = torch.randn(*shape, IN, dtype=dtype).to(device)
        self.grad = torch.randn(*shape, OUT, dtype=dtype).to(device)
        exact = copy.deepcopy(self.linear).double()
        x = self.x.to(torch.float64, copy=True).requires_grad_()
        self.y = exact(x)
        self.y.backward(self.grad.double())
        self.grad_x, self.grad_weight = x.grad, exact.weight.grad
        self.grad_bias = exact.bias.grad if bias else None
        self.rows = self.grad.numel() // OUT

        # The same products of absolute values; error bounds are relative to these.
        absolute = copy.deepcopy(exact).requires_grad_(False)
        for parameter in absolute.parameters():
            parameter.abs_()
        grad, rows = self.grad.double().abs(), x.detach().abs().reshape(-1, IN)
        self.magnitudes = {
            "y": absolute(x.detach().abs()),
            "grad_x": grad @ absolute.weight,
            "grad_weight": grad.reshape(-1, OUT).t() @ rows,
            "grad_bias": grad.reshape(-1, OUT).sum(0),
        }

    def check(
        self, found: Tensor, name: str, terms: int, dim: int | None = None,
        comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        """Compare with ``y``, ``grad_x``, ``grad_weight`` or ``grad_bias``, or with the part of a
        rank in ``dim``."""
        exact, magnitude = getattr(self, name), self.magnitudes[name]
        assert_within_bound(found, part(exact, dim, comm), part(magnitude, dim, comm), terms)


def part(full: Tensor, dim: int | None, comm: Communicator | None) -> Tensor:
    return full if dim is None else full.tensor_split(comm.world_size, dim)[comm.rank]


SCATTER = {"reduce": "reduce_scatter"}
# The class, its options, and in which dimension a rank has a part of input, output and bias.
KINDS: list[tuple[type[Any], dict[str, Any], int | None, int | None, int | None]] = [
    (RowParallelLinear, {}, -1, None, None),
    (RowParallelLinear, {"input_is_parallel": False}, None, None, None),
    (RowParallelLinear, SCATTER, -1, 0, None),
    (RowParallelLinear, {"input_is_parallel": False} | SCATTER, None, 0, None),
    (ColumnParallelLinear, {}, None, -1, 0),
    (ColumnParallelLinear, {"gather_output": True}, None, None, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "options", "x_dim", "y_dim", "bias_dim"), KINDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_values_and_gradients(
    world_size: int, kind: Any, options: dict[str, Any], x_dim: int | None, y_dim: int | None,
    bias_dim: int | None, bias: bool, dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    case = Case(dtype, bias, device=device)

    def on_rank(comm: Communicator) -> None:
        layer, is_row = kind.from_linear(case.linear, comm, **options), kind is RowParallelLinear
        x = part(case.x, x_dim, comm).clone().requires_grad_()
        y = layer(x)
        assert y.dtype == dtype
        case.check(y, "y", IN + world_size * is_row, y_dim, comm)
        y.backward(part(case.grad, y_dim, comm))
        case.check(x.grad, "grad_x", OUT + world_size * (not is_row), x_dim, comm)
        case.check(layer.weight.grad, "grad_weight", case.rows, int(is_row), comm)
        if bias:
            terms = case.rows + world_size * is_row
            case.check(layer.bias.grad, "grad_bias", terms, bias_dim, comm)

    run_threads(world_size, on(device, on_rank))


def test_the_backward_of_a_row_parallel_layer_needs_no_peers() -> None:
    """Documented by Rust's RowParallelLinear: grad_X_t = grad_Y W_t^T, without a collective."""
    case = Case(torch.float64)
    barrier = CollectiveBarrier(2)

    def forward(rank: int) -> tuple[RowParallelLinear, Tensor, Tensor]:
        layer = RowParallelLinear.from_linear(case.linear, barrier.communicator(rank))
        assert (layer.rank, layer.world_size) == (rank, 2)
        x = part(case.x, -1, layer.comm).clone().requires_grad_()
        return layer, x, layer(x)

    with ThreadPoolExecutor(2) as ranks:
        (layer, x, y), (other, _, same) = ranks.map(forward, range(2))
    assert torch.equal(y, same)
    case.check(y, "y", IN + 2)
    other.comm.close()
    y.backward(case.grad)
    expected = case.grad @ layer.weight
    assert_within_bound(x.grad, expected, case.grad.abs() @ layer.weight.abs(), 2 * OUT)
    assert torch.equal(torch.cat([layer.weight, other.weight], 1), case.linear.weight)
    assert torch.equal(layer.bias, case.linear.bias)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (2, 0, 3)])
def test_any_number_of_dimensions_and_no_rows(shape: tuple[int, ...], device: torch.device) -> None:
    case = Case(torch.float64, shape=shape, device=device)

    def on_rank(comm: Communicator) -> None:
        column = ColumnParallelLinear.from_linear(case.linear, comm, gather_output=True)
        row = RowParallelLinear.from_linear(case.linear, comm)
        strided = case.x.movedim(0, -1).contiguous().movedim(-1, 0)
        for y in (row(part(strided, -1, comm)), column(strided)):
            case.check(y, "y", IN + 2)
        inputs = (case.x.clone(), part(case.x, -1, comm).clone())
        for layer, x in zip((column, row), inputs, strict=True):
            x.requires_grad_()
            y = layer(x)
            case.check(y, "y", IN + 2)
            y.backward(case.grad)
            assert x.grad.shape == x.shape
            assert layer.weight.grad.shape == layer.weight.shape
        case.check(inputs[0].grad, "grad_x", OUT + 2)
        case.check(row.bias.grad, "grad_bias", case.rows + 2)

    run_threads(2, on(device, on_rank))


def test_skip_bias_add_and_no_reduction(device: torch.device) -> None:
    case = Case(torch.float64, device=device)

    def on_rank(comm: Communicator) -> None:
        x = part(case.x, -1, comm)
        row = functools.partial(RowParallelLinear.from_linear, case.linear, comm)
        y, bias = row(skip_bias_add=True)(x)
        case.check(y + bias, "y", IN + 2)
        y, bias = row(reduce="none", skip_bias_add=True)(x)
        case.check(reduce_from_ranks(y, comm) + bias, "y", IN + 2)
        column = ColumnParallelLinear.from_linear(
            case.linear, comm, gather_output=True, skip_bias_add=True
        )
        y, bias = column(case.x)
        case.check(y + bias, "y", IN)
        (y + bias).backward(case.grad)
        case.check(column.bias.grad, "grad_bias", ROWS, 0, comm)
        # With scattered rows, the returned bias still gets the gradient of all rows.
        scattered = row(reduce="reduce_scatter", skip_bias_add=True)
        y, bias = scattered(x)
        (y + bias).backward(part(case.grad, 0, comm))
        case.check(scattered.bias.grad, "grad_bias", ROWS + 2)
        unbiased = RowParallelLinear(IN, OUT, False, comm=comm, skip_bias_add=True, device=device)
        assert unbiased(x.float())[1] is None

    run_threads(2, on(device, on_rank))


def test_layers_on_meta_compute_shapes() -> None:
    (comm,) = Communicator.threads(1)
    x = torch.ones(3, IN, device="meta")
    for kind in (RowParallelLinear, ColumnParallelLinear):
        y = kind(IN, OUT, comm=comm, device="meta")(x)
        assert y.is_meta and y.shape == (3, OUT)


def test_autocast_and_no_grad(device: torch.device) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(8, IN).to(device), nn.Linear(IN, 8).to(device)
    x = torch.randn(ROWS, 8).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        expected = down(up(x))

    def on_rank(comm: Communicator) -> None:
        pair = nn.Sequential(
            ColumnParallelLinear.from_linear(up, comm), RowParallelLinear.from_linear(down, comm)
        )
        with torch.autocast(device.type, torch.bfloat16):
            y = pair(x)
        assert y.dtype == torch.bfloat16
        # Both results round the hidden features, each partial sum, and each sum.
        magnitude = (x.abs() @ up.weight.abs().t() + up.bias.abs()) @ down.weight.abs().t()
        bound = 2 * gamma(8, 2**-8) * (magnitude + down.bias.abs())
        assert ((y.float() - expected.float()).abs() <= bound).all()
        y.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in pair.parameters())
        with torch.no_grad():
            assert not pair(x).requires_grad

    run_threads(2, on(device, on_rank))


def mlp_on_rank(comm: Communicator, backend: str, device: str) -> bytes:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(6, IN), nn.GELU(), nn.Linear(IN, OUT), nn.ReLU())
    plain.double().to(device)
    leaf = torch.randn(2, 5, 6, dtype=torch.float64).to(device).requires_grad_()
    expected = plain(leaf)
    expected.square().sum().backward()
    column = ColumnParallelLinear.from_linear(plain[0], comm)
    row = RowParallelLinear.from_linear(plain[2], comm)
    sharded = nn.Sequential(column, nn.GELU(), row, nn.ReLU(inplace=True))
    x = leaf.detach().clone().requires_grad_()
    y = (torch.compile(sharded, fullgraph=True, backend=backend) if backend else sharded)(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, leaf.grad)
    if device == "cuda":
        comm.barrier()  # Raises errors of the device.
    assert_full_gradients(sharded, plain)
    return y.detach().cpu().numpy().tobytes()


@pytest.mark.compile
@pytest.mark.processes
@pytest.mark.parametrize(
    "backend", ["", "aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_processes(backend: str, device: torch.device) -> None:
    first, second = run_processes(2, mlp_on_rank, backend, device.type)
    assert first == second  # The same bits on all ranks.
