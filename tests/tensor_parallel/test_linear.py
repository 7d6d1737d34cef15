"""Row- and column-parallel linear layers compared with nn.Linear: values and gradients."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.error_bounds import gamma
from support.ranks import on, run_processes, run_threads
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipekernels import (
    CollectiveBarrier,
    ColumnParallelLinear,
    Communicator,
    RowParallelLinear,
    reference,
)
from pipekernels.tensor_parallel.functional import reduce_from_ranks, row_linear

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
    ):
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
        rows, grad = x.detach().abs().reshape(-1, IN), self.grad.double().abs().reshape(-1, OUT)
        self.y_magnitude = absolute(x.detach().abs())
        self.grad_x_magnitude = self.grad.double().abs() @ absolute.weight
        self.grad_weight_magnitude = grad.t() @ rows
        self.grad_bias_magnitude = grad.sum(0)


def part(full: Tensor, dim: int, comm: Communicator) -> Tensor:
    return full.tensor_split(comm.world_size, dim)[comm.rank]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("input_is_parallel", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_row_parallel(
    world_size: int,
    input_is_parallel: bool,
    reduce: str,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    case = Case(dtype, bias, device=device)

    def on_rank(comm: Communicator) -> None:
        layer = RowParallelLinear.from_linear(
            case.linear, comm, input_is_parallel=input_is_parallel, reduce=reduce
        )

        def input_part(full: Tensor) -> Tensor:
            return part(full, -1, comm) if input_is_parallel else full

        def output_part(full: Tensor) -> Tensor:
            return part(full, 0, comm) if reduce == "reduce_scatter" else full

        x = input_part(case.x).clone().requires_grad_()
        y = layer(x)
        assert y.dtype == dtype
        assert_within_bound(y, output_part(case.y), output_part(case.y_magnitude), IN + world_size)
        y.backward(output_part(case.grad))
        assert_within_bound(x.grad, input_part(case.grad_x), input_part(case.grad_x_magnitude), OUT)
        assert_within_bound(
            layer.weight.grad,
            part(case.grad_weight, 1, comm),
            part(case.grad_weight_magnitude, 1, comm),
            case.rows,
        )
        if bias:
            terms = case.rows + world_size
            assert_within_bound(layer.bias.grad, case.grad_bias, case.grad_bias_magnitude, terms)

    run_threads(world_size, on(device, on_rank))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gather_output", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_column_parallel(
    world_size: int, gather_output: bool, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(dtype, bias, device=device)

    def on_rank(comm: Communicator) -> None:
        layer = ColumnParallelLinear.from_linear(case.linear, comm, gather_output=gather_output)

        def output_part(full: Tensor) -> Tensor:
            return full if gather_output else part(full, -1, comm)

        x = case.x.clone().requires_grad_()
        y = layer(x)
        assert y.dtype == dtype
        assert_within_bound(y, output_part(case.y), output_part(case.y_magnitude), IN)
        y.backward(output_part(case.grad))
        assert_within_bound(x.grad, case.grad_x, case.grad_x_magnitude, OUT + world_size)
        assert_within_bound(
            layer.weight.grad,
            part(case.grad_weight, 0, comm),
            part(case.grad_weight_magnitude, 0, comm),
            case.rows,
        )
        if bias:
            exact, magnitude = case.grad_bias, case.grad_bias_magnitude
            assert_within_bound(
                layer.bias.grad, part(exact, 0, comm), part(magnitude, 0, comm), case.rows
            )

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
    assert_within_bound(y, case.y, case.y_magnitude, IN + 2)
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
            assert_within_bound(y, case.y, case.y_magnitude, IN + 2)
        inputs = (case.x.clone(), part(case.x, -1, comm).clone())
        for layer, x in zip((column, row), inputs, strict=True):
            x.requires_grad_()
            y = layer(x)
            assert_within_bound(y, case.y, case.y_magnitude, IN + 2)
            y.backward(case.grad)
            assert x.grad.shape == x.shape
            assert layer.weight.grad.shape == layer.weight.shape
        assert_within_bound(inputs[0].grad, case.grad_x, case.grad_x_magnitude, OUT + 2)
        assert_within_bound(row.bias.grad, case.grad_bias, case.grad_bias_magnitude, case.rows + 2)

    run_threads(2, on(device, on_rank))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_column_then_row_is_the_plain_pair(world_size: int, device: torch.device) -> None:
    """The pair needs no communication in between: shards of its hidden features correspond."""
    torch.manual_seed(0)
    up, down = (nn.Linear(*size).to(device).double() for size in ((5, IN), (IN, 6)))
    x = torch.randn(ROWS, 5, dtype=torch.float64).to(device).requires_grad_()
    expected = down(torch.tanh(up(x)))
    expected.sum().backward()

    def on_rank(comm: Communicator) -> None:
        first = ColumnParallelLinear.from_linear(up, comm)
        second = RowParallelLinear.from_linear(down, comm)
        own = x.detach().clone().requires_grad_()
        y = second(torch.tanh(first(own)))
        y.sum().backward()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(own.grad, x.grad)
        torch.testing.assert_close(first.weight.grad, part(up.weight.grad, 0, comm))
        torch.testing.assert_close(second.bias.grad, down.bias.grad)

    run_threads(world_size, on(device, on_rank))


def test_the_reference_equals_the_plain_layer() -> None:
    case = Case(torch.float64)
    weights = list(case.linear.weight.tensor_split(3, 1))
    y = reference.row_parallel_linear(list(case.x.tensor_split(3, 1)), weights, case.linear.bias)
    assert_within_bound(y.detach(), case.y, case.y_magnitude, IN + 3)
    weights, biases = (list(p.tensor_split(3)) for p in (case.linear.weight, case.linear.bias))
    parts = reference.column_parallel_linear(case.x, weights, biases)
    assert_within_bound(torch.cat(parts, -1).detach(), case.y, case.y_magnitude, IN)


def test_skip_bias_add_and_no_reduction(device: torch.device) -> None:
    case = Case(torch.float64, device=device)

    def on_rank(comm: Communicator) -> None:
        x = part(case.x, -1, comm)
        y, bias = RowParallelLinear.from_linear(case.linear, comm, skip_bias_add=True)(x)
        assert_within_bound(y + bias, case.y, case.y_magnitude, IN + 2)
        partial = RowParallelLinear.from_linear(
            case.linear, comm, reduce="none", skip_bias_add=True
        )
        y, bias = partial(x)
        assert_within_bound(reduce_from_ranks(y, comm) + bias, case.y, case.y_magnitude, IN + 2)
        column = ColumnParallelLinear.from_linear(
            case.linear, comm, gather_output=True, skip_bias_add=True
        )
        y, bias = column(case.x)
        assert_within_bound(y + bias, case.y, case.y_magnitude, IN)
        (y + bias).backward(case.grad)
        grad = part(case.grad_bias, 0, comm)
        assert_within_bound(column.bias.grad, grad, part(case.grad_bias_magnitude, 0, comm), ROWS)
        # With scattered rows, the returned bias still gets the gradient of all rows.
        scattered = RowParallelLinear.from_linear(
            case.linear, comm, reduce="reduce_scatter", skip_bias_add=True
        )
        y, bias = scattered(x)
        (y + bias).backward(part(case.grad, 0, comm))
        assert_within_bound(scattered.bias.grad, case.grad_bias, case.grad_bias_magnitude, ROWS + 2)
        unbiased = RowParallelLinear(IN, OUT, False, comm=comm, skip_bias_add=True, device=device)
        assert unbiased(x.float())[1] is None

    run_threads(2, on(device, on_rank))


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 130, 1100])
def test_every_algorithm_of_a_row_parallel_product(
    rows: int, world_size: int, device: torch.device
) -> None:
    """All obey the error bound; "overlapped" and "triton" have the same bits."""
    torch.manual_seed(0)
    k, n = 64 * world_size, 520
    full = [torch.randn(size, dtype=torch.bfloat16).to(device) for size in ((rows, k), (n, k))]
    exact = full[0].double() @ full[1].double().t()
    magnitude = full[0].double().abs() @ full[1].double().abs().t()

    def on_rank(comm: Communicator) -> None:
        results = {}
        for algorithm in ("auto", "cublas", "triton", "overlapped"):
            x, weight = leaves = [
                t.contiguous().requires_grad_()
                for t in (part(full[0], 1, comm), part(full[1], 1, comm))
            ]
            for _ in range(3):  # The first call compiles the kernel.
                y = row_linear(x, weight, comm, algorithm=algorithm)
            assert_within_bound(y, exact, magnitude, k + world_size)
            grad = torch.ones_like(y)
            results[algorithm] = y, *torch.autograd.grad(y, leaves, grad)
        for ours, other in zip(results["overlapped"], results["triton"], strict=True):
            assert torch.equal(ours, other)

    run_threads(world_size, on(device, on_rank))


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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool, device: torch.device) -> None:
    case = Case(torch.float64, device=device)

    def on_rank(comm: Communicator) -> None:
        layer = RowParallelLinear.from_linear(case.linear, comm, input_is_parallel=False)
        x = case.x.clone().requires_grad_()
        y = checkpoint(lambda t: layer(t).tanh(), x, use_reentrant=use_reentrant)
        y.sum().backward()
        grad, layer.weight.grad = layer.weight.grad, None
        plain = case.x.clone().requires_grad_()
        layer(plain).tanh().sum().backward()
        assert torch.equal(x.grad, plain.grad)
        assert torch.equal(grad, layer.weight.grad)

    run_threads(2, on(device, on_rank))


class SmallMLP:
    """A plain MLP and an input, from a fixed seed."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        up, down = nn.Linear(6, IN).double(), nn.Linear(IN, OUT).double()
        self.up, self.down = up.to(device), down.to(device)
        self.x = torch.randn(2, 5, 6, dtype=torch.float64).to(device).requires_grad_()

    def __call__(self) -> Tensor:
        return torch.relu(self.down(functional.gelu(self.up(self.x))))

    def sharded(self, comm: Communicator) -> nn.Sequential:
        return nn.Sequential(
            ColumnParallelLinear.from_linear(self.up, comm),
            nn.GELU(),
            RowParallelLinear.from_linear(self.down, comm),
            nn.ReLU(inplace=True),
        )

    def check_gradients(self, sharded: nn.Sequential, comm: Communicator) -> None:
        column, row = sharded[0], sharded[2]
        torch.testing.assert_close(column.weight.grad, part(self.up.weight.grad, 0, comm))
        torch.testing.assert_close(column.bias.grad, part(self.up.bias.grad, 0, comm))
        torch.testing.assert_close(row.weight.grad, part(self.down.weight.grad, 1, comm))
        torch.testing.assert_close(row.bias.grad, self.down.bias.grad)


def mlp_on_rank(comm: Communicator, backend: str, device: str) -> bytes:
    plain = SmallMLP(device)
    expected = plain()
    expected.square().sum().backward()
    sharded = plain.sharded(comm)
    x = plain.x.detach().clone().requires_grad_()
    y = (torch.compile(sharded, fullgraph=True, backend=backend) if backend else sharded)(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, plain.x.grad)
    plain.check_gradients(sharded, comm)
    if device == "cuda":
        if not backend:
            check_captured(sharded, x.detach(), y)
        comm.barrier()  # Raises errors of the device.
    return y.detach().cpu().numpy().tobytes()


def check_captured(module: nn.Module, x: Tensor, expected: Tensor) -> None:
    """A CUDA graph of ``module`` gives the same bits for the input at the time of its replay."""
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = module(static)
    static.copy_(x)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.compile
@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "backend", ["", "aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_processes(backend: str, device: torch.device) -> None:
    first, second = run_processes(2, mlp_on_rank, backend, device.type, limit=110.0)
    assert first == second  # The same bits on all ranks.
