"""The pipeline over one of two mesh dimensions; the other has data or tensor parallelism."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_processes
from support.spmd_cases import (
    WIDTH,
    assert_same_grads,
    exactly,
    mlp,
    randn,
    run,
    square,
    stages,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipekernels import ColumnParallelLinear, Communicator, PipelineModule, RowParallelLinear

pytestmark = pytest.mark.processes


def gathered(module: nn.Module, group: dist.ProcessGroup) -> nn.Sequential:
    """Copies of the modules of all ranks of ``group``, in rank order."""
    modules: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(modules, module, group=group)
    return nn.Sequential(*modules)


def assert_equal_on_all_ranks(mine: Tensor) -> None:
    drawn = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, mine)
    assert all(torch.equal(other, mine) for other in drawn)


def data_parallel(comm: Communicator) -> None:
    mesh = square("data")
    pipe, data = mesh.get_local_rank("pipe"), mesh.get_local_rank("data")
    torch.manual_seed(7)  # The same seed on all ranks.
    with mesh:
        module = PipelineModule("pipe", 2, mlp)
    reference = gathered(module.module, mesh.get_group("pipe"))
    replicas = gathered(module.module, mesh.get_group("data"))
    assert (module.model_axis_name, module.num_microbatches, module.module_fn) == ("pipe", 2, mlp)
    # Stages differ, replicas do not, and the ranks' generators have the same state.
    assert not torch.equal(reference[0][0].weight, reference[1][0].weight)
    assert torch.equal(replicas[0][0].weight, replicas[1][0].weight)
    assert_equal_on_all_ranks(torch.rand(1))

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


def tensor_parallel(comm: Communicator) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = square("tensor")
    pipe = mesh.get_local_rank("pipe")
    modules: list[Any] = [*stages(2)]
    reference: Any = nn.Sequential(*copy.deepcopy(modules))
    x = randn(6, WIDTH)
    with Communicator.from_process_group(mesh.get_group("tensor")) as ranks:
        first, _, second = modules[pipe]
        module: Any = nn.Sequential(
            ColumnParallelLinear.from_linear(first, ranks),
            nn.Tanh(),
            RowParallelLinear.from_linear(second, ranks),
        )
        output = run(module, x, mesh, 3)
        output.square().mean().backward()
        expected = reference(x)
        expected.square().mean().backward()
        torch.testing.assert_close(output, expected if pipe == 1 else 0 * expected, **exactly)
        grad = reference[pipe][0].weight.grad.chunk(2)[ranks.rank]
        torch.testing.assert_close(module[0].weight.grad, grad, **exactly)
        grad = reference[pipe][2].weight.grad.chunk(2, dim=1)[ranks.rank]
        torch.testing.assert_close(module[2].weight.grad, grad, **exactly)

    # The same with torch's own tensor parallelism, on DTensors.
    module = parallelize_module(
        modules[pipe], mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    output = run(module, x, mesh, 3)
    output.square().mean().backward()
    torch.testing.assert_close(output, expected if pipe == 1 else 0 * expected, **exactly)
    for p, q in zip(module.parameters(), reference[pipe].parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, **exactly)


@pytest.mark.parametrize("body", [data_parallel, tensor_parallel])
def test_on_ranks(body: Callable[[Communicator], None]) -> None:
    run_processes(4, body)
