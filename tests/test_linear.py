"""Row- and column-parallel linears against nn.Linear: values, gradients, state, traces, errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear, reference
from pipekernels.ops.tensor_parallel import reduce_from_ranks, row_linear
from pipekernels.tensor_parallel import full_state_dict

WORLD_SIZES = [1, 2, 3, 4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# 13 and 7 are divided by no world size but 1; the rows are by all, as reduce_scatter wants it.
IN, OUT, ROWS = 13, 7, 12


def gamma(terms: int, unit: float) -> float:
    """Relative error bound of a sum of products with ``terms`` roundings (Higham, 2002, 3.1)."""
    return terms * unit / (1 - terms * unit)


def close(value: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> None:
    """Compare a sharded product with the float64 one.

    Each product accumulates ``terms`` terms, over all ranks, in at least float32 (float64 for
    float64), and is rounded to its dtype at most three times: a rank's partial sum, the sum over
    ranks, and the sum with the bias. ``exact`` has roundings of its own, in float64.
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

        # The same products of absolute values, on which the error bounds are relative.
        absolute = copy.deepcopy(exact).requires_grad_(False)
        for parameter in absolute.parameters():
            parameter.abs_()
        rows, grad = x.detach().abs().reshape(-1, IN), self.grad.double().abs().reshape(-1, OUT)
        self.y_magnitude = absolute(x.detach().abs())
        self.grad_x_magnitude = self.grad.double().abs() @ absolute.weight
        self.grad_weight_magnitude = grad.t() @ rows
        self.grad_bias_magnitude = grad.sum(0)


def on_ranks(world_size: int, device: torch.device, body: Callable[[Communicator], Any]) -> None:
    """``body`` on a thread per rank; on a GPU in streams of their own, as ranks wait for each other.

    Autograd would run the backwards of all ranks on its one thread for the GPU, where the first rank's
    collective would wait for the second's.
    """

    def in_stream(comm: Communicator) -> None:
        with (
            torch.cuda.stream(torch.cuda.Stream(device)),
            torch.autograd.set_multithreading_enabled(False),
        ):
            body(comm)
            torch.cuda.current_stream().synchronize()
            comm.barrier()  # Raises what went wrong on the device.

    if device.type == "cpu":
        run_threads(world_size, body)
    else:
        torch.cuda.synchronize()
        run_threads(world_size, in_stream)


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
        close(y, output_part(case.y), output_part(case.y_magnitude), IN + world_size)
        y.backward(output_part(case.grad))
        close(x.grad, input_part(case.grad_x), input_part(case.grad_x_magnitude), OUT)
        close(
            layer.weight.grad,
            part(case.grad_weight, 1, comm),
            part(case.grad_weight_magnitude, 1, comm),
            case.rows,
        )
        if bias:
            terms = case.rows + world_size
            close(layer.bias.grad, case.grad_bias, case.grad_bias_magnitude, terms)

    on_ranks(world_size, device, on_rank)


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
        close(y, output_part(case.y), output_part(case.y_magnitude), IN)
        y.backward(output_part(case.grad))
        close(x.grad, case.grad_x, case.grad_x_magnitude, OUT + world_size)
        close(
            layer.weight.grad,
            part(case.grad_weight, 0, comm),
            part(case.grad_weight_magnitude, 0, comm),
            case.rows,
        )
        if bias:
            exact, magnitude = case.grad_bias, case.grad_bias_magnitude
            close(layer.bias.grad, part(exact, 0, comm), part(magnitude, 0, comm), case.rows)

    on_ranks(world_size, device, on_rank)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (2, 0, 3)])
def test_any_number_of_dimensions_and_no_rows(shape: tuple[int, ...], device: torch.device) -> None:
    case = Case(torch.float64, shape=shape, device=device)

    def on_rank(comm: Communicator) -> None:
        column = ColumnParallelLinear.from_linear(case.linear, comm, gather_output=True)
        row = RowParallelLinear.from_linear(case.linear, comm)
        inputs = (case.x.clone(), part(case.x, -1, comm).clone())
        for layer, x in zip((column, row), inputs, strict=True):
            x.requires_grad_()
            y = layer(x)
            close(y, case.y, case.y_magnitude, IN + 2)
            y.backward(case.grad)
            assert x.grad.shape == x.shape
            assert layer.weight.grad.shape == layer.weight.shape
        close(inputs[0].grad, case.grad_x, case.grad_x_magnitude, OUT + 2)
        close(row.bias.grad, case.grad_bias, case.grad_bias_magnitude, case.rows + 2)

    on_ranks(2, device, on_rank)


def test_non_contiguous_input(device: torch.device) -> None:
    case = Case(torch.float64, device=device)

    def on_rank(comm: Communicator) -> None:
        row = RowParallelLinear.from_linear(case.linear, comm)
        column = ColumnParallelLinear.from_linear(case.linear, comm, gather_output=True)
        strided = case.x.t().contiguous().t()
        for y in (row(part(strided, -1, comm)), column(strided)):
            close(y, case.y, case.y_magnitude, IN + 2)

    on_ranks(2, device, on_rank)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_column_then_row_is_the_plain_pair(world_size: int, device: torch.device) -> None:
    """Whole output features of the first layer are whole input features of the second."""
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

    on_ranks(world_size, device, on_rank)


def test_the_oracle_is_the_plain_layer() -> None:
    case = Case(torch.float64)
    weights = list(case.linear.weight.tensor_split(3, 1))
    y = reference.row_parallel_linear(list(case.x.tensor_split(3, 1)), weights, case.linear.bias)
    close(y.detach(), case.y, case.y_magnitude, IN + 3)
    weights, biases = (list(p.tensor_split(3)) for p in (case.linear.weight, case.linear.bias))
    parts = reference.column_parallel_linear(case.x, weights, biases)
    close(torch.cat(parts, -1).detach(), case.y, case.y_magnitude, IN)


def test_skip_bias_add_and_no_reduction(device: torch.device) -> None:
    case = Case(torch.float64, device=device)

    def on_rank(comm: Communicator) -> None:
        x = part(case.x, -1, comm)
        y, bias = RowParallelLinear.from_linear(case.linear, comm, skip_bias_add=True)(x)
        close(y + bias, case.y, case.y_magnitude, IN + 2)
        partial = RowParallelLinear.from_linear(
            case.linear, comm, reduce="none", skip_bias_add=True
        )
        y, bias = partial(x)
        close(reduce_from_ranks(y, comm) + bias, case.y, case.y_magnitude, IN + 2)
        column = ColumnParallelLinear.from_linear(
            case.linear, comm, gather_output=True, skip_bias_add=True
        )
        y, bias = column(case.x)
        close(y + bias, case.y, case.y_magnitude, IN)
        (y + bias).backward(case.grad)
        grad = part(case.grad_bias, 0, comm)
        close(column.bias.grad, grad, part(case.grad_bias_magnitude, 0, comm), ROWS)
        # With the rows scattered, the bias handed out still gets its whole gradient.
        scattered = RowParallelLinear.from_linear(
            case.linear, comm, reduce="reduce_scatter", skip_bias_add=True
        )
        y, bias = scattered(x)
        (y + bias).backward(part(case.grad, 0, comm))
        close(scattered.bias.grad, case.grad_bias, case.grad_bias_magnitude, ROWS + 2)
        assert (
            RowParallelLinear(IN, OUT, False, comm=comm, skip_bias_add=True, device=device)(
                x.float()
            )[1]
            is None
        )

    on_ranks(2, device, on_rank)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 130, 1100])
def test_every_way_to_a_row_parallel_product(
    rows: int, world_size: int, device: torch.device
) -> None:
    """Overlapped with its all-reduce, Triton's product has the same bits; others are as close."""
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
            for _ in range(3):  # The first time with the kernel's compilation.
                y = row_linear(x, weight, comm, algorithm=algorithm)
            close(y, exact, magnitude, k + world_size)
            grad = torch.ones_like(y)
            results[algorithm] = y, *torch.autograd.grad(y, leaves, grad)
        for ours, other in zip(results["overlapped"], results["triton"], strict=True):
            assert torch.equal(ours, other)

    on_ranks(world_size, device, on_rank)


def test_ways_that_are_not_there() -> None:
    (comm,) = Communicator.threads(1)
    x, weight = torch.ones(4, 4), torch.ones(4, 4)
    with pytest.raises(ValueError, match="auto, triton, cublas, overlapped, got 'gemm'"):
        row_linear(x, weight, comm, algorithm="gemm")
    with pytest.raises(ValueError, match="'overlapped' needs CUDA tensors, got cpu; use 'auto'"):
        row_linear(x, weight, comm, algorithm="overlapped")
    meta = x.to("meta")
    with pytest.raises(ValueError, match="needs CUDA"):
        row_linear(meta, meta, comm, scatter=True, algorithm="overlapped")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", [RowParallelLinear, ColumnParallelLinear])
def test_initialisation_is_that_of_nn_linear(kind: Any, world_size: int) -> None:
    torch.manual_seed(3)
    full = nn.Linear(IN, OUT)
    after = torch.rand(())
    layers = []
    for comm in Communicator.threads(world_size):
        torch.manual_seed(3)
        layers.append(kind(IN, OUT, comm=comm))
        assert torch.rand(()) == after  # As many random numbers as nn.Linear draws.
        torch.manual_seed(3)
        again = copy.deepcopy(layers[-1])
        again.reset_parameters()
        assert torch.equal(again.weight, layers[-1].weight)
    dim = 1 if kind is RowParallelLinear else 0
    assert torch.equal(torch.cat([layer.weight for layer in layers], dim), full.weight)
    if kind is ColumnParallelLinear:
        assert torch.equal(torch.cat([layer.bias for layer in layers]), full.bias)
    else:
        assert all(torch.equal(layer.bias, full.bias) for layer in layers)
    sizes = [layer.weight.shape[dim] for layer in layers]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_full_state_dict_round_trip(world_size: int) -> None:
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(5, IN), nn.LayerNorm(3), nn.Sequential(nn.Linear(IN, 4)))
    state = full.state_dict()

    def on_rank(comm: Communicator) -> None:
        model = nn.Sequential(
            ColumnParallelLinear(5, IN, comm=comm),
            nn.LayerNorm(3),
            nn.Sequential(RowParallelLinear(IN, 4, comm=comm)),
        )
        model.load_state_dict(state)
        written = full_state_dict(model)
        assert list(written) == list(state)
        assert all(torch.equal(written[key], state[key]) for key in state)
        assert torch.equal(model[0].full_state_dict()["weight"], full[0].weight)

        other = copy.deepcopy(model)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        other.load_state_dict(model.state_dict())  # This rank's part.
        assert torch.equal(other[0].weight, model[0].weight)
        other.load_state_dict(state, assign=True)
        assert torch.equal(other[0].weight, model[0].weight)
        assert other[0].weight.untyped_storage().nbytes() == other[0].weight.nbytes
        wrong = {**state, "0.weight": torch.zeros(IN + 1, 5)}
        with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
            model.load_state_dict(wrong)

    run_threads(world_size, on_rank)
    assert state["0.weight"].shape == (IN, 5)  # Loading leaves the caller's dict alone.


def test_from_linear_keeps_dtype_mode_and_frozen_parameters() -> None:
    linear = nn.Linear(4, 6, dtype=torch.bfloat16).eval()
    linear.bias.requires_grad_(False)
    (comm,) = Communicator.threads(1)
    state = torch.random.get_rng_state()
    for kind in (RowParallelLinear, ColumnParallelLinear):
        layer = kind.from_linear(linear, comm)
        assert layer.weight.dtype == torch.bfloat16
        assert not layer.training
        assert layer.weight.requires_grad
        assert not layer.bias.requires_grad
        assert layer.weight.data_ptr() != linear.weight.data_ptr()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_deepcopy_shares_the_communicator_and_pickling_says_what_to_do() -> None:
    (comm,) = Communicator.threads(1)
    layer = RowParallelLinear(4, 6, comm=comm)
    clone = copy.deepcopy(nn.Sequential(layer))[0]
    assert clone.comm is comm
    assert clone.weight is not layer.weight
    assert torch.equal(clone.weight, layer.weight)
    with pytest.raises(TypeError, match="cannot be pickled.*state_dict"):
        pickle.dumps(layer)


def test_autocast_and_no_grad() -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(8, IN), nn.Linear(IN, 8)
    x = torch.randn(ROWS, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = down(up(x))

    def on_rank(comm: Communicator) -> None:
        pair = nn.Sequential(
            ColumnParallelLinear.from_linear(up, comm), RowParallelLinear.from_linear(down, comm)
        )
        with torch.autocast("cpu", torch.bfloat16):
            y = pair(x)
        assert y.dtype == torch.bfloat16
        # Both results round the hidden features, each partial sum and each sum once more.
        magnitude = (x.abs() @ up.weight.abs().t() + up.bias.abs()) @ down.weight.abs().t()
        bound = 2 * gamma(8, 2**-8) * (magnitude + down.bias.abs())
        assert ((y.float() - expected.float()).abs() <= bound).all()
        y.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in pair.parameters())
        with torch.no_grad():
            assert not pair(x).requires_grad

    run_threads(2, on_rank)


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

    on_ranks(2, device, on_rank)


def test_extra_repr() -> None:
    _, comm = Communicator.threads(2)
    assert repr(RowParallelLinear(4, 6, comm=comm)) == (
        "RowParallelLinear(in_features=4, out_features=6, bias=True, rank=1, world_size=2, "
        "reduce='all_reduce')"
    )
    assert "bias=False, rank=1, world_size=2, gather_output=False" in repr(
        ColumnParallelLinear(4, 6, False, comm=comm)
    )


def test_errors_state_value_limit_and_remedy() -> None:
    comm, _ = Communicator.threads(2)
    with pytest.raises(ValueError, match="1 features over 2 ranks.*at most 1 ranks"):
        RowParallelLinear(1, 4, comm=comm)
    with pytest.raises(ValueError, match="1 features over 2 ranks"):
        ColumnParallelLinear(4, 1, comm=comm)
    with pytest.raises(ValueError, match="'all_reduce', 'reduce_scatter' or 'none', got 'sum'"):
        RowParallelLinear(4, 4, comm=comm, reduce="sum")
    with pytest.raises(ValueError, match="once per rank; pass bias=False, or skip_bias_add"):
        RowParallelLinear(4, 4, comm=comm, reduce="none")
    with pytest.raises(TypeError, match="got str; make one with Communicator.from_process_group"):
        RowParallelLinear(4, 4, comm="gloo")
    with pytest.raises(TypeError, match="must be an nn.Linear, got Conv1d"):
        RowParallelLinear.from_linear(nn.Conv1d(1, 1, 1), comm)

    row, column = RowParallelLinear(5, 4, comm=comm), ColumnParallelLinear(5, 4, comm=comm)
    with pytest.raises(ValueError, match=r"rank 0 of 2 expects 3 .*\(2, 5\).*input_is_parallel=F"):
        row(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"expects 5 features.*got a tensor of shape \(2, 3\)$"):
        column(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"shape \(\)"):
        column(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"dtype torch.float32 but its input torch.float64.*\.to"):
        row(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="is on cpu but its input on meta"):
        row(torch.ones(2, 3, device="meta"))
    scatter = RowParallelLinear(5, 4, comm=comm, reduce="reduce_scatter")
    for shape in ((3, 3), (3,)):
        with pytest.raises(ValueError, match="reduce_scatter.*pad"):
            scatter(torch.ones(shape))


class SmallMLP:
    """A plain MLP and an input that the seed decides."""

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


def mlp_on_rank(comm: Communicator, compiled: bool, device: str) -> bytes:
    plain = SmallMLP(device)
    expected = plain()
    expected.square().sum().backward()
    sharded = plain.sharded(comm)
    x = plain.x.detach().clone().requires_grad_()
    y = (torch.compile(sharded, fullgraph=True) if compiled else sharded)(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, plain.x.grad)
    plain.check_gradients(sharded, comm)
    if device == "cuda":
        if not compiled:
            check_captured(sharded, x.detach(), y)
        comm.barrier()  # Raises what went wrong on the device.
    return y.detach().cpu().numpy().tobytes()


def check_captured(module: nn.Module, x: Tensor, expected: Tensor) -> None:
    """A CUDA graph of ``module`` gives the same bits, with whatever input there is when it runs."""
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = module(static)
    static.copy_(x)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_processes(compiled: bool, device: torch.device) -> None:
    first, second = run_processes(2, mlp_on_rank, compiled, device.type, limit=110.0)
    assert first == second  # The same bits on all ranks.


def ddp_on_rank(world: Communicator) -> None:
    """Two replicas of a model, each on two ranks; DDP averages the gradients over Gloo."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # These share a replica,
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # and these a part of the model.
    replica, shard = divmod(world.rank, 2)
    plain = SmallMLP()
    plain().square().mean().backward()
    with Communicator.from_process_group(pairs[replica]) as comm:
        sharded = plain.sharded(comm)
        ddp = nn.parallel.DistributedDataParallel(sharded, process_group=peers[shard])
        ddp(plain.x[replica]).square().mean().backward()
        plain.check_gradients(sharded, comm)
        world.barrier()


def test_ddp_over_sharded_replicas() -> None:
    run_processes(4, ddp_on_rank)
