"""The pipeline over a mesh dimension: values and gradients of the same stages as a Sequential.

The interface is that of xlstm-jax's ``execute_pipeline``, ``execute_pipeline_step`` and
``PipelineModule``.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.function_layer import FunctionLayer
from support.ranks import run_processes
from support.spmd_cases import (
    WIDTH,
    assert_same_grads,
    exactly,
    line,
    mlp,
    randn,
    run,
    stages,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipekernels import Communicator, execute_pipeline, execute_pipeline_step

pytestmark = pytest.mark.processes


def flattened() -> nn.Module:
    """``[batch, tokens, WIDTH]`` to ``[batch * tokens, WIDTH]``."""
    return FunctionLayer(lambda x: x.flatten(0, 1))


def reshaping(index: int) -> nn.Module:
    """Stages whose results differ from their inputs in number of dimensions, shape and dtype."""
    made = [
        nn.Embedding(10, WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Sequential(nn.Linear(2 * WIDTH, 4), flattened()),
    ]
    return made[index].double()


STAGES: list[Callable[[int], nn.Module]] = [
    lambda index: mlp().requires_grad_(index > 0),
    lambda index: mlp().requires_grad_(index == 0),
    lambda index: nn.Sequential(FunctionLayer(Tensor.detach), mlp()) if index == 1 else mlp(),
    lambda index: nn.Tanh() if index == 1 else mlp(),
    lambda index: nn.Sequential(nn.ReLU(inplace=True), mlp()),
]


def assert_equals_sequential(
    comm: Communicator, mesh: DeviceMesh, modules: Sequence[nn.Module], x: Tensor, m: int
) -> Tensor:
    """Check output and gradients of the parameters and of ``x``; returns the output."""
    reference = nn.Sequential(*copy.deepcopy(modules))
    mine, last = modules[comm.rank], comm.world_size - 1
    x_reference = x.clone().detach().requires_grad_(x.requires_grad)
    expected = reference(x_reference)
    target = randn(*expected.shape, seed=2)
    output = run(mine, x, mesh, m)
    assert output.shape == expected.shape
    assert output.dtype == expected.dtype
    assert output.requires_grad == expected.requires_grad
    wanted = expected if comm.rank == last else torch.zeros_like(expected)
    torch.testing.assert_close(output, wanted, **exactly)
    if expected.requires_grad:
        (expected - target).square().mean().backward()
        (output - target).square().mean().backward()
        assert_same_grads(mine, reference[comm.rank])
    if x.requires_grad:
        wanted = x_reference.grad if comm.rank == 0 else torch.zeros_like(x)
        torch.testing.assert_close(x.grad, wanted, **exactly)
    return output


def equals_sequential(comm: Communicator) -> None:
    mesh, world_size = line(comm), comm.world_size
    for m in (1, 2, 3, 6):
        x = randn(12, WIDTH).requires_grad_(m % 2 == 0)
        assert_equals_sequential(comm, mesh, stages(world_size), x, m)
    for make in STAGES:
        assert_equals_sequential(comm, mesh, stages(world_size, make), randn(6, WIDTH), 3)
    if world_size == 3:
        ids = torch.arange(8).reshape(4, 2)
        assert_equals_sequential(comm, mesh, stages(3, reshaping), ids, 2)
    frozen = [mlp().requires_grad_(False) for _ in range(world_size)]
    assert_equals_sequential(comm, mesh, frozen, randn(6, WIDTH), 2)
    assert_equals_sequential(comm, mesh, stages(world_size), randn(0, WIDTH), 2)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not assert_equals_sequential(
                comm, mesh, stages(world_size), randn(6, WIDTH), 2
            ).requires_grad


class Named(nn.Module):
    """Takes and returns several tensors, one of which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"hidden": self.layer(value), "ids": value.detach().long(), "old": value.sin()}
        if isinstance(value, dict):
            return self.layer(value["hidden"]), value["ids"] + value["old"], value["ids"]
        first, second, ids = value
        return self.layer(first * second), ids


def several_tensors(comm: Communicator) -> None:
    modules = stages(3, lambda _: Named())
    reference = nn.Sequential(*copy.deepcopy(modules))
    x, x_reference = (randn(6, WIDTH).requires_grad_() for _ in range(2))
    expected = reference(x_reference)
    output = run(modules[comm.rank], x, line(comm), 3)
    for mine, wanted in zip(output, expected, strict=True):
        assert mine.dtype == wanted.dtype and mine.requires_grad == wanted.requires_grad
        torch.testing.assert_close(mine, wanted if comm.rank == 2 else 0 * wanted, **exactly)
    output[0].square().sum().backward()
    expected[0].square().sum().backward()
    assert_same_grads(modules[comm.rank], reference[comm.rank])
    wanted = x_reference.grad if comm.rank == 0 else torch.zeros_like(x)
    torch.testing.assert_close(x.grad, wanted, **exactly)


def arguments(comm: Communicator) -> None:
    """Unsplit arguments, an enclosing mesh, no ``x`` on the last stage, unusual tensors."""
    with line(comm):
        module = FunctionLayer(lambda x, factor, *, shift: x * factor + shift["by"])
        x = randn(4, WIDTH).requires_grad_()
        factor, by = randn(WIDTH, seed=2).requires_grad_(), randn(WIDTH, seed=3).requires_grad_()
        output = execute_pipeline(
            module,
            x if comm.rank == 0 else None,
            factor,
            num_microbatches=2,
            model_axis_name="pipe",
            shift={"by": by},
        )
        expected = (x * factor + by) * factor + by
        (output * randn(4, WIDTH, seed=4)).sum().backward()
        if comm.rank == 1:
            torch.testing.assert_close(output, expected, **exactly)
        # Each rank has the gradients of its own use of the arguments; all uses are their sum.
        grads = [factor.grad.clone(), by.grad.clone()]
        for total in grads:
            dist.all_reduce(total)
        wanted = torch.autograd.grad(expected, [x, factor, by], randn(4, WIDTH, seed=4))
        torch.testing.assert_close(grads, list(wanted[1:]), **exactly)
        if comm.rank == 0:
            torch.testing.assert_close(x.grad, wanted[0], **exactly)

    # Lazily conjugated or transposed results; the second stage undoes the function of the first.
    z = torch.complex(randn(4, 2, 3), randn(4, 2, 3, seed=2)).requires_grad_()
    (undone,) = torch.autograd.grad(z.abs().sum(), z)
    for function in (torch.conj, torch.adjoint, lambda t: t.transpose(1, 2)):
        z.grad = None
        output = run(FunctionLayer(function), z, line(comm), 2)
        output.abs().sum().backward()
        if comm.rank == 0:
            torch.testing.assert_close(z.grad, undone, **exactly)
        else:
            torch.testing.assert_close(output, z, **exactly)

    # The same memory for every microbatch's result.
    buffer = torch.empty(1, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        output = run(FunctionLayer(lambda t: torch.sin(t, out=buffer)), x, line(comm), 4)
    torch.testing.assert_close(output, comm.rank * x.sin().sin(), **exactly)


def autograd(comm: Communicator) -> None:
    mesh = line(comm)
    module = stages(2)[comm.rank]
    reference = nn.Sequential(*stages(2))
    x = randn(6, WIDTH).requires_grad_()
    expected = torch.autograd.grad(reference(x).square().sum(), [x, *reference.parameters()])
    calls = []
    parameter = next(module.parameters())
    parameter.register_hook(lambda grad: calls.append(grad))

    # torch.autograd.grad, on each rank for its own parameters; .grad stays the same.
    mine = list(module.parameters())
    where = 1 + comm.rank * len(mine)
    grads = torch.autograd.grad(run(module, x, mesh, 3).square().sum(), mine)
    torch.testing.assert_close(grads, expected[where : where + len(mine)], **exactly)
    assert len(calls) == 1
    (grad,) = torch.autograd.grad(run(module, x, mesh, 3).square().sum(), x)
    wanted = expected[0] if comm.rank == 0 else torch.zeros_like(x)
    torch.testing.assert_close(grad, wanted, **exactly)
    assert x.grad is None
    assert parameter.grad is None

    # A second backward, if the graph is kept; hooks run once per backward, not per microbatch.
    loss = run(module, x, mesh, 3).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(calls) == 3
    torch.testing.assert_close([p.grad for p in mine], [2 * g for g in grads], **exactly)
    loss = run(module, x, mesh, 3).sum()  # sum() saves no tensors that would raise earlier.
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()

    # No double backward.
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(run(module, x, mesh, 3).square().sum(), x, create_graph=True)

    # Backwards go from the last microbatch to the first.
    count, order = itertools.count(), []

    def note(layer: nn.Module, args: Any, y: Tensor) -> None:
        m = next(count)
        y.register_hook(lambda _: order.append(m))

    noted = nn.Sequential(module, nn.Tanh())
    noted[1].register_forward_hook(note)
    run(noted, x, mesh, 3).sum().backward()
    assert order == [2, 1, 0]

    # Two batches in flight, the later one differentiated last.
    first, second = run(module, x, mesh, 3), run(module, 2 * x, mesh, 2)
    module.zero_grad()
    first.sum().backward()
    second.sum().backward()
    reference.zero_grad()
    (reference(x).sum() + reference(2 * x).sum()).backward()
    assert_same_grads(module, reference[comm.rank])


def loop_of_steps(comm: Communicator) -> None:
    mesh, world_size, m = line(comm), comm.world_size, 3
    modules = stages(world_size)
    reference = nn.Sequential(*copy.deepcopy(modules))
    x = randn(6, WIDTH).requires_grad_()
    x_reference = x.detach().clone().requires_grad_()
    with mesh:
        state = torch.zeros(2, WIDTH, dtype=torch.float64)
        outputs = []
        # In the last iterations the first stage gets zeros, in the first ones the last stage does.
        for part in [*x.chunk(m), *[torch.zeros_like(state)] * (world_size - 1)]:
            state, output = execute_pipeline_step(
                modules[comm.rank], state, part, model_axis_name="pipe"
            )
            outputs.append(output)
    assert len(outputs) == m + world_size - 1
    output = torch.cat(outputs[-m:])
    expected = reference(x_reference)
    is_last = comm.rank == world_size - 1
    torch.testing.assert_close(output, expected if is_last else 0 * expected, **exactly)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_same_grads(modules[comm.rank], reference[comm.rank])
    wanted = x_reference.grad if comm.rank == 0 else torch.zeros_like(x)
    torch.testing.assert_close(x.grad, wanted, **exactly)
    with torch.no_grad():
        state = execute_pipeline_step(
            nn.Tanh(), state, randn(2, WIDTH), model_axis_name="pipe", mesh=mesh
        )[0]
        assert not state.requires_grad
    with pytest.raises(
        ValueError, match=r"returned .*\(shape=\(2, 6\).*, not .*\(shape=\(1, 2, 6\)"
    ):
        execute_pipeline_step(
            flattened(), state[None], state[None], model_axis_name="pipe", mesh=mesh
        )


@pytest.mark.parametrize(
    ("body", "world_size"),
    [
        *((equals_sequential, world_size) for world_size in (1, 2, 3)),
        (several_tensors, 3),
        *((body, 2) for body in (arguments, autograd)),
        *((loop_of_steps, world_size) for world_size in (1, 3)),
    ],
)
def test_on_ranks(body: Callable[[Communicator], None], world_size: int) -> None:
    run_processes(world_size, body)
