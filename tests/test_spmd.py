"""The pipeline over a mesh dimension: values and gradients against the same stages in a row, other
axes beside it, random numbers, errors.

The interface and what it documents are those of xlstm-jax's ``execute_pipeline``,
``execute_pipeline_step`` and ``PipelineModule``.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pipekernels import (
    ColumnParallelLinear,
    Communicator,
    PipelineModule,
    RowParallelLinear,
    execute_pipeline,
    execute_pipeline_step,
)

LIMIT = 100.0
WIDTH = 6
exactly = {"rtol": 0.0, "atol": 1e-10}


def line(comm: Communicator) -> DeviceMesh:
    """All ranks in one dimension."""
    return init_device_mesh("cpu", (comm.world_size,), mesh_dim_names=("pipe",))


def square(other: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", other))


def randn(*shape: int, seed: int = 1) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mlp(_: int = 0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def stages(world_size: int, make: Callable[[int], nn.Module] = mlp) -> list[nn.Module]:
    torch.manual_seed(3)
    return [make(index) for index in range(world_size)]


def run(module: nn.Module, x: Tensor | None, mesh: DeviceMesh, m: int, **kwargs: Any) -> Tensor:
    return execute_pipeline(
        module, x, num_microbatches=m, model_axis_name="pipe", mesh=mesh, **kwargs
    )


def assert_same_grads(module: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        torch.testing.assert_close(
            torch.zeros_like(p) if p.grad is None else p.grad, wanted, **exactly
        )


def assert_equals_sequential(
    comm: Communicator, mesh: DeviceMesh, modules: list[nn.Module], x: Tensor, m: int
) -> Tensor:
    """Output, gradients of the parameters and of ``x``; returns the output."""
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


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Tokens(nn.Module):
    """``[batch, tokens, WIDTH]`` to ``[batch * tokens, WIDTH]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


def reshaping(index: int) -> nn.Module:
    """Stages whose results differ in rank, shape and dtype from what they get."""
    made = [
        nn.Embedding(10, WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Sequential(nn.Linear(2 * WIDTH, 4), Tokens()),
    ]
    return made[index].double()


def frozen_first(index: int) -> nn.Module:
    return mlp().requires_grad_(index > 0)


def frozen_last(index: int) -> nn.Module:
    return mlp().requires_grad_(index == 0)


def detached_in_between(index: int) -> nn.Module:
    return nn.Sequential(Detach(), mlp()) if index == 1 else mlp()


def without_parameters(index: int) -> nn.Module:
    return nn.Tanh() if index == 1 else mlp()


def in_place(index: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), mlp())


def equals_sequential(comm: Communicator) -> None:
    mesh, world_size = line(comm), comm.world_size
    for m in (1, 2, 3, 6):
        x = randn(12, WIDTH).requires_grad_(m % 2 == 0)
        assert_equals_sequential(comm, mesh, stages(world_size), x, m)
    for make in (frozen_first, frozen_last, detached_in_between, without_parameters, in_place):
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_the_sequential_model(world_size: int) -> None:
    run_processes(world_size, equals_sequential, limit=LIMIT)


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: Tensor, *, shift: dict[str, Tensor]) -> Tensor:
        return x * factor + shift["by"]


def arguments(comm: Communicator) -> None:
    """Whole arguments, an enclosing mesh, no ``x`` where it is not needed, unusual tensors."""
    with line(comm):
        module = Scaled()
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
        # Each rank's uses of the arguments: together they are all uses.
        grads = [torch.zeros_like(factor), torch.zeros_like(by)]
        for total, tensor in zip(grads, (factor, by), strict=True):
            total += tensor.grad
            dist.all_reduce(total)
        wanted = torch.autograd.grad(expected, [x, factor, by], randn(4, WIDTH, seed=4))
        torch.testing.assert_close(grads, list(wanted[1:]), **exactly)
        if comm.rank == 0:
            torch.testing.assert_close(x.grad, wanted[0], **exactly)

    # Results whose memory does not show their values, or not in order; two such stages undo it.
    z = torch.complex(randn(4, 2, 3), randn(4, 2, 3, seed=2)).requires_grad_()
    (wanted,) = torch.autograd.grad(z.abs().sum(), z)
    for function in (torch.conj, torch.adjoint, lambda t: t.transpose(1, 2)):
        z.grad = None
        output = run(Apply(function), z, line(comm), 2)
        output.abs().sum().backward()
        if comm.rank == 0:
            torch.testing.assert_close(z.grad, wanted, **exactly)
        else:
            torch.testing.assert_close(output, z, **exactly)


def test_arguments_and_unusual_tensors() -> None:
    run_processes(2, arguments, limit=LIMIT)


class Ordered(nn.Module):
    """Notes in which order micro-batches, numbered by their forwards, are differentiated."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self._order = order
        self._count = 0

    def forward(self, x: Tensor) -> Tensor:
        y, m = x.clone(), self._count
        self._count += 1
        y.register_hook(lambda _: self._order.append(m))
        return y


class Dropped(nn.Module):
    """A module, then dropout; both checkpointed or not."""

    def __init__(self, module: nn.Module, recompute: bool) -> None:
        super().__init__()
        self._layers = nn.Sequential(module, nn.Dropout(0.5))
        self._recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self._recompute:
            return checkpoint(self._layers, x, use_reentrant=False)
        return self._layers(x)


def autograd(comm: Communicator) -> None:
    mesh = line(comm)
    module = stages(2)[comm.rank]
    reference = nn.Sequential(*stages(2))
    x = randn(6, WIDTH).requires_grad_()
    expected = torch.autograd.grad(reference(x).square().sum(), [x, *reference.parameters()])
    calls = []
    parameter = next(module.parameters())
    parameter.register_hook(lambda grad: calls.append(grad))

    # torch.autograd.grad, on both ranks with respect to what they have; .grad is left alone.
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

    # Twice through one graph, if it is kept; hooks fire once per backward, not per micro-batch.
    loss = run(module, x, mesh, 3).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(calls) == 3
    torch.testing.assert_close([p.grad for p in mine], [2 * g for g in grads], **exactly)
    loss = run(module, x, mesh, 3).sum()  # Which saves nothing that could be missed first.
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()

    # No double backward.
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(run(module, x, mesh, 3).square().sum(), x, create_graph=True)

    # Backwards go from the last micro-batch to the first.
    order: list[int] = []
    run(nn.Sequential(module, Ordered(order)), x, mesh, 3).sum().backward()
    assert order == [2, 1, 0]

    # Checkpointing in the module, with dropout: the same masks again, the same gradients.
    found = []
    for recompute in (False, True):
        torch.manual_seed(5)
        module.zero_grad()
        run(Dropped(module, recompute), x, mesh, 3).square().sum().backward()
        found.append([p.grad for p in mine])
    torch.testing.assert_close(*found, **exactly)

    # Two batches in flight, the later one differentiated last.
    first, second = run(module, x, mesh, 3), run(module, 2 * x, mesh, 2)
    module.zero_grad()
    first.sum().backward()
    second.sum().backward()
    reference.zero_grad()
    (reference(x).sum() + reference(2 * x).sum()).backward()
    assert_same_grads(module, reference[comm.rank])


def test_autograd_sees_ordinary_tensors() -> None:
    run_processes(2, autograd, limit=LIMIT)


def gathered(module: nn.Module, group: dist.ProcessGroup) -> nn.Sequential:
    """Copies of the modules of all ranks of ``group``, in a row."""
    modules: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(modules, module, group=group)
    return nn.Sequential(*modules)


def data_parallel(comm: Communicator) -> None:
    mesh = square("data")
    pipe, data = mesh.get_local_rank("pipe"), mesh.get_local_rank("data")
    torch.manual_seed(7)  # Alike everywhere, as for one model.
    with mesh:
        module = PipelineModule("pipe", 2, mlp)
    reference = gathered(module.module, mesh.get_group("pipe"))
    replicas = gathered(module.module, mesh.get_group("data"))
    assert (module.model_axis_name, module.num_microbatches, module.module_fn) == ("pipe", 2, mlp)
    # Stages differ, replicas do not, and the generators are in step.
    assert not torch.equal(reference[0][0].weight, reference[1][0].weight)
    assert torch.equal(replicas[0][0].weight, replicas[1][0].weight)
    drawn = [torch.empty(1) for _ in range(4)]
    dist.all_gather(drawn, torch.rand(1))
    assert len({value.item() for value in drawn}) == 1

    x, target = randn(8, WIDTH), randn(8, WIDTH, seed=2)
    replicated = DistributedDataParallel(module, process_group=mesh.get_group("data"))
    for _ in range(2):
        output = replicated(x.chunk(2)[data])
        (output - target.chunk(2)[data]).square().mean().backward()
        (reference(x) - target).square().mean().backward()
        assert_same_grads(module.module, reference[pipe])
    expected = reference(x).chunk(2)[data]
    output = module(x.chunk(2)[data])
    torch.testing.assert_close(output, expected if pipe == 1 else 0 * expected, **exactly)


def test_data_parallelism_beside_it() -> None:
    run_processes(4, data_parallel, limit=LIMIT)


def tensor_parallel(comm: Communicator) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = square("tensor")
    pipe = mesh.get_local_rank("pipe")
    modules = stages(2)
    reference = nn.Sequential(*copy.deepcopy(modules))
    x = randn(6, WIDTH)
    with Communicator.from_process_group(mesh.get_group("tensor")) as ranks:
        first, _, second = modules[pipe]
        module = nn.Sequential(
            ColumnParallelLinear.from_linear(first, ranks),
            nn.Tanh(),
            RowParallelLinear.from_linear(second, ranks),
        )
        output = run(module, x, mesh, 3, replicated_axis_names=["tensor"])
        output.square().mean().backward()
        expected = reference(x)
        expected.square().mean().backward()
        torch.testing.assert_close(output, expected if pipe == 1 else 0 * expected, **exactly)
        grad = reference[pipe][0].weight.grad.chunk(2)[ranks.rank]
        torch.testing.assert_close(module[0].weight.grad, grad, **exactly)
        grad = reference[pipe][2].weight.grad.chunk(2, dim=1)[ranks.rank]
        torch.testing.assert_close(module[2].weight.grad, grad, **exactly)

    # torch's own, on DTensors.
    module = parallelize_module(
        modules[pipe], mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    output = run(module, x, mesh, 3)
    output.square().mean().backward()
    torch.testing.assert_close(output, expected if pipe == 1 else 0 * expected, **exactly)
    for p, q in zip(module.parameters(), reference[pipe].parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, **exactly)


def test_tensor_parallelism_beside_it() -> None:
    run_processes(4, tensor_parallel, limit=LIMIT)


class Masks(nn.Module):
    """Records the dropout masks of all micro-batches; ranks take their time differently."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        self.masks.append(nn.functional.dropout(torch.ones(64), 0.5))
        return x * self.masks[-1].mean()


def random_numbers(comm: Communicator) -> None:
    mesh = square("other")
    group = mesh.get_group("other")

    def masks(seed: int, seconds: float = 0.0, m: int = 3, **kwargs: Any) -> Tensor:
        torch.manual_seed(seed)
        module = Masks(seconds)
        run(module, torch.ones(m, 2), mesh, m, **kwargs)
        return torch.stack(module.masks)

    def of_all(mine: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        all_masks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_masks, mine, group=group)
        return torch.cat(all_masks)

    mine = masks(1)
    assert len(of_all(mine).unique(dim=0)) == 4 * 3
    assert torch.equal(masks(1, seconds=0.01 * comm.rank), mine)
    assert not torch.equal(masks(2), mine)
    # A micro-batch's numbers do not depend on how many there are.
    assert torch.equal(masks(1, m=2), mine[:2])
    first, second = of_all(masks(1, replicated_axis_names=("other",)), group).chunk(2)
    assert torch.equal(first, second)
    # What the caller draws next does not depend on what the stages drew.
    drawn = [torch.empty(1) for _ in range(4)]
    dist.all_gather(drawn, torch.rand(1))
    assert len({value.item() for value in drawn}) == 1


def test_random_numbers_belong_to_rank_and_micro_batch() -> None:
    run_processes(4, random_numbers, limit=LIMIT)


def loop_of_steps(comm: Communicator) -> None:
    mesh, world_size, m = line(comm), comm.world_size, 3
    modules = stages(world_size)
    reference = nn.Sequential(*copy.deepcopy(modules))
    x = randn(6, WIDTH).requires_grad_()
    x_reference = x.detach().clone().requires_grad_()
    with mesh:
        state = torch.zeros(2, WIDTH, dtype=torch.float64)
        outputs = []
        # In the last iterations the first stage has nothing more to do, in the first the last.
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
        ValueError, match=r"returned torch.float64 \[2, 6\].* not torch.float64 \[1, 2, 6\]"
    ):
        execute_pipeline_step(Tokens(), state[None], state[None], model_axis_name="pipe", mesh=mesh)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_loop_of_steps_is_the_pipeline(world_size: int) -> None:
    run_processes(world_size, loop_of_steps, limit=LIMIT)


class Failing(nn.Module):
    """Raises, or returns something else, at its ``at``-th micro-batch."""

    def __init__(self, at: int, returns: Any = None) -> None:
        super().__init__()
        self._left = at
        self._returns = returns

    def forward(self, x: Tensor) -> Any:
        self._left -= 1
        if self._left >= 0:
            return x.sin()
        if self._returns is None:
            raise KeyError("of this stage")
        return self._returns


def failures(comm: Communicator) -> None:
    """Every rank raises, its own exception or one that names the stage, and can go on."""
    mesh = line(comm)
    x = randn(6, WIDTH)
    modules = stages(3)

    def assert_fails(
        at_rank: int, failing: nn.Module, error: type[Exception], words: str, x: Any = x
    ) -> None:
        mine = comm.rank == at_rank
        if not mine:
            error, words = RuntimeError, rf"stage {at_rank} of the pipeline, rank {at_rank}, raised"
        with pytest.raises(error, match=words):
            run(failing if mine else modules[comm.rank], x, mesh, 3)
        assert_equals_sequential(comm, mesh, stages(3), randn(6, WIDTH), 2)

    for at_rank in range(3):
        for at in (0, 2):
            assert_fails(at_rank, Failing(at), KeyError, "of this stage")
    assert_fails(1, Failing(0, "no tensor"), TypeError, "must return a tensor, not str")
    assert_fails(0, Failing(1, torch.ones(1)), ValueError, "every micro-batch must give the same")
    assert_fails(2, Failing(0, torch.ones(())), ValueError, "without dimensions")
    # Only the first stage needs x; when it has a wrong one, the others learn it.
    bad = x[:4] if comm.rank == 0 else None
    assert_fails(0, modules[0], ValueError, "must be divisible", bad)
    for bad in (None, [1.0]):
        assert_fails(0, modules[0], TypeError, "x must be a tensor", bad if comm.rank == 0 else x)


def test_an_exception_reaches_every_rank() -> None:
    run_processes(3, failures, limit=LIMIT)


class Dying(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return x


def death(comm: Communicator) -> None:
    mesh = line(comm)
    with pytest.raises(RuntimeError):
        run(Dying() if comm.rank == 1 else nn.Tanh(), randn(6, WIDTH), mesh, 3)


def test_a_dead_stage_is_an_error_on_the_others() -> None:
    run_processes(3, death, limit=LIMIT, killed=(1,))


def bad_arguments(comm: Communicator) -> None:
    mesh = line(comm)
    module = nn.Tanh()
    x = randn(5, 2)
    # The sentence is xlstm-jax's.
    message = "^Batch size 5 must be divisible by number of microbatches 3;"
    with pytest.raises(ValueError, match=message):
        run(module, x, mesh, 3)
    with pytest.raises(ValueError, match="x has no dimension"):
        run(module, x[0, 0], mesh, 1)
    for m in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"num_microbatches is {m!r}"):
            run(module, x, mesh, m)
        with pytest.raises(ValueError, match=f"num_microbatches is {m!r}"):
            PipelineModule("pipe", m, nn.Tanh, mesh=mesh)
    with pytest.raises(TypeError, match="module must be an nn.Module, not builtin_function"):
        run(torch.tanh, x, mesh, 1)
    with pytest.raises(TypeError, match="what module_fn returns must be an nn.Module, not int"):
        PipelineModule("pipe", 1, int, mesh=mesh)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, not str"):
        run(module, x, "pipe", 1)
    with pytest.raises(ValueError, match="there is no device mesh; pass mesh="):
        execute_pipeline(module, x, num_microbatches=1, model_axis_name="pipe")
    with pytest.raises(ValueError, match=r"no dimension 'model'; its dimensions are \['pipe'\]"):
        execute_pipeline(module, x, num_microbatches=1, model_axis_name="model", mesh=mesh)
    with pytest.raises(ValueError, match="no dimension 'tensor'"):
        run(module, x, mesh, 1, replicated_axis_names=["tensor"])
    with pytest.raises(ValueError, match="whose ranks hold different stages"):
        run(module, x, mesh, 1, replicated_axis_names=["pipe"])
    with pytest.raises(ValueError, match="no dimension 'pipe'"):
        run(module, x, init_device_mesh("cpu", (2,)), 1)
    elsewhere = DeviceMesh("cpu", [0], mesh_dim_names=("pipe",))
    if comm.rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the mesh"):
            run(module, x, elsewhere, 1)


def test_bad_arguments() -> None:
    run_processes(2, bad_arguments, limit=LIMIT)
