"""The differentiable collectives: values, gradients, compilation, errors."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import reference
from support.checks import assert_raises
from support.levels import in_gate
from support.ranks import on, run_processes, run_threads
from torch import Tensor

from pipekernels import Communicator, ops
from pipekernels.tensor_parallel import functional as tp

WORLD_SIZES = [1, 2, 3, 4]
ROWS = 12  # A multiple of every world size.


def inputs(world_size: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A tensor of small integers per rank: sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(world_size)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for _ in range(world_size)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_values_equal_the_oracle(world_size: int, dtype: torch.dtype, device: torch.device) -> None:
    xs = [x.to(device) for x in inputs(world_size, ROWS, 3, dtype=dtype)]
    total, gathered = reference.all_reduce(xs, "sum"), torch.cat(xs)
    largest = reference.all_reduce(xs, "max")

    def on_rank(comm: Communicator) -> None:
        x, before = xs[comm.rank], xs[comm.rank].clone()
        results = [
            (ops.all_reduce(x, comm), total),
            (ops.all_reduce(x, comm, "max"), largest),
            (ops.reduce_scatter(x, comm), total.chunk(world_size)[comm.rank]),
            (ops.all_gather(x, comm), gathered),
            (ops.broadcast(x, comm, world_size - 1), xs[-1]),
        ]
        for result, expected in results:
            assert torch.equal(result, expected)
            assert result.dtype == dtype
            result.zero_()  # No result aliases the input.
            assert torch.equal(x, before)

    run_threads(world_size, on(device, on_rank))


# Each case: the operation on one rank, and a reference for all ranks at once. Autograd of the
# reference gives the expected gradients of the sum of all ranks' losses.
SUMMED_LOSS: dict[str, tuple[Any, Any]] = {
    "all_reduce": (ops.all_reduce, lambda xs: [sum(xs)] * len(xs)),
    "all_reduce avg": (
        lambda x, comm: ops.all_reduce(x, comm, "avg"),
        lambda xs: [sum(xs) / len(xs)] * len(xs),
    ),
    "reduce_scatter": (ops.reduce_scatter, lambda xs: [*torch.stack(xs).sum(0).chunk(len(xs))]),
    "reduce_scatter avg": (
        lambda x, comm: ops.reduce_scatter(x, comm, "avg"),
        lambda xs: [*torch.stack(xs).mean(0).chunk(len(xs))],
    ),
    "all_gather": (ops.all_gather, lambda xs: [torch.cat(xs)] * len(xs)),
    "broadcast": (
        lambda x, comm: ops.broadcast(x, comm, comm.world_size - 1),
        lambda xs: [xs[-1]] * len(xs),
    ),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SUMMED_LOSS)
def test_gradients_are_those_of_the_summed_loss(
    name: str, world_size: int, device: torch.device
) -> None:
    op, together = SUMMED_LOSS[name]
    xs = [x.to(device).requires_grad_() for x in inputs(world_size, ROWS, 3)]
    ys = together(xs)
    cotangents = [torch.randn_like(y) for y in ys]
    expected = torch.autograd.grad(ys, xs, cotangents, allow_unused=True)

    def on_rank(comm: Communicator) -> None:
        x = xs[comm.rank].detach().requires_grad_()
        op(x, comm).backward(cotangents[comm.rank])
        wanted = expected[comm.rank]
        torch.testing.assert_close(x.grad, torch.zeros_like(x) if wanted is None else wanted)

    run_threads(world_size, on(device, on_rank))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_plain_collectives_are_differentiable_twice(operation: str, device: torch.device) -> None:
    """The expected values come from one process that has the tensors of both ranks."""
    joined = {
        "all_reduce": lambda x: x.sum(0, keepdim=True).expand(2, -1, -1),
        "reduce_scatter": lambda x: x.sum(0).unflatten(0, (2, -1)),
        "all_gather": lambda x: x.flatten(0, 1).expand(2, -1, -1),
        "broadcast": lambda x: x[:1].expand(2, -1, -1),
    }
    xs = torch.stack(inputs(2, ROWS, 3)).to(device)

    def second(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return torch.autograd.grad((grad**2).sum(), x)[0]

    whole = xs.clone().requires_grad_()
    expected = second(joined[operation](whole), whole)

    def on_rank(comm: Communicator) -> None:
        x = xs[comm.rank].clone().requires_grad_()
        torch.testing.assert_close(second(getattr(ops, operation)(x, comm), x), expected[comm.rank])

    run_threads(2, on(device, on_rank))


STEPS = {
    "copy_to_ranks": tp.copy_to_ranks,
    "reduce_from_ranks": tp.reduce_from_ranks,
    "scatter_to_ranks": tp.scatter_to_ranks,
    "gather_from_ranks": lambda x, comm: tp.gather_from_ranks(x, comm, 3),
    "row_linear": lambda x, comm: tp.row_linear(x, x.detach(), comm),
    "row_linear, scatter": lambda x, comm: tp.row_linear(x, x.detach(), comm, scatter=True),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_second_derivative_of_a_tensor_parallel_step_raises(
    step: str, device: torch.device
) -> None:
    (comm,) = Communicator.threads(1)
    x = torch.ones(3, 3, device=device, requires_grad=True)
    # The gradient of a sum has no graph, so if the step raised nothing, this would not raise
    # either.
    with pytest.raises(RuntimeError, match="can be differentiated once only"):
        torch.autograd.grad(STEPS[step](x, comm).sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True])
def test_registration(requires_grad: bool, device: torch.device) -> None:
    """Schema, fake and autograd agree with what the kernels do (torch.library.opcheck)."""
    (comm,) = Communicator.threads(1)
    x = torch.randn(4, 3, device=device, requires_grad=requires_grad)
    registered, opcheck = torch.ops.pipekernels, torch.library.opcheck
    opcheck(registered.all_reduce, (x, comm.handle, "sum", "auto", "rank"))
    opcheck(registered.reduce_scatter, (x, comm.handle, "sum", "rank"))
    opcheck(registered.all_gather, (x, comm.handle))
    opcheck(registered.broadcast, (x, comm.handle, 0))
    weight = torch.randn(5, 3, device=device)
    opcheck(registered.row_linear, (x.detach(), weight, None, None, 5, comm.handle, False))


@pytest.mark.compile
@pytest.mark.parametrize("backend", in_gate(["aot_eager"], ["aot_eager", "inductor"]))
def test_compiles_to_one_graph(backend: str, device: torch.device) -> None:
    (comm,) = Communicator.threads(1)

    def everything(x: Tensor) -> Tensor:
        x = ops.all_reduce(tp.copy_to_ranks(x, comm), comm)
        x = ops.all_gather(ops.reduce_scatter(x, comm), comm)
        x = tp.gather_from_ranks(tp.scatter_to_ranks(x.sin(), comm), comm, x.shape[-1])
        return ops.broadcast(tp.reduce_from_ranks(x, comm), comm)

    x = torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.compile(everything, fullgraph=True, backend=backend)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x.sin())
    torch.testing.assert_close(grad, x.cos())


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")  # It warns of each graph break.
def test_methods_of_a_communicator_are_graph_breaks(device: torch.device) -> None:
    (comm,) = Communicator.threads(1)

    def everything(x: Tensor) -> Tensor:
        x = comm.all_gather(comm.reduce_scatter(comm.all_reduce(x + 1) + 1) + 1)
        comm.barrier()
        return comm.broadcast(comm.empty(3, device=device).copy_(x) + 1) + 1

    zeros = torch.zeros(3, device=device)
    assert torch.equal(torch.compile(everything, backend="eager")(zeros), zeros + 5)


def cache_in(rank: int, folder: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def compiled_twice(comm: Communicator) -> None:
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        torch.compile(ops.broadcast, fullgraph=True)(x, comm, 0).sum().backward()
        assert x.grad.tolist() == [0.0 if comm.rank else 2.0] * 3
        comm.barrier()  # Both ranks' graphs are in the cache now.
        torch._dynamo.reset()  # The second iteration looks its graph up in the cache.


@pytest.mark.full
@pytest.mark.compile
@pytest.mark.processes
def test_ranks_do_not_share_cached_graphs(tmp_path: Path) -> None:
    """Graphs depend on the rank: broadcast's backward returns zeros on all ranks but the source."""
    run_processes(2, compiled_twice, prepare=(cache_in, tmp_path))


def test_errors_state_value_limit_and_remedy() -> None:
    (comm,) = Communicator.threads(1)
    first, _ = Communicator.threads(2)
    x, meta = torch.ones(3, requires_grad=True), torch.ones(3, device="meta")
    no_gradient = r"op='max' has no gradient.*x\.detach\(\)"
    assert_raises(RuntimeError, no_gradient, ops.all_reduce, x, comm, "max")
    for call in (ops.all_reduce, ops.reduce_scatter, ops.all_gather, ops.broadcast):
        assert_raises(TypeError, "comm must be a Communicator, got NoneType", call, x, None)
    assert_raises(ValueError, "3 features over 4 ranks.*at most 3 ranks", tp.shard_sizes, 3, 4)
    held = r"holds 3 of 6 features over 2 ranks, but x has shape \(4,\)"
    assert_raises(ValueError, held, tp.gather_from_ranks, torch.ones(4), first, 6)
    moved = r"is on cpu, but the input on meta; move it with \.to"
    assert_raises(ValueError, moved, comm.output, (3,), meta)
