"""The pipeline over a mesh dimension: exceptions, killed ranks, bad arguments, and its end."""

import atexit
import contextlib
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import leaves_the_group, run_processes
from support.spmd_cases import LIMIT, WIDTH, assert_equals_sequential, line, randn, run, stages
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipekernels import Communicator, PipelineModule, execute_pipeline

pytestmark = pytest.mark.processes


class Failing(nn.Module):
    """At micro-batch ``at``, raises, or returns ``returns`` if that is given."""

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
    """Every rank raises, the failing one its own error; the next call works."""
    from torch.distributed.tensor import Replicate, distribute_tensor  # Slow to import.

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
    replicated = distribute_tensor(x[:2], init_device_mesh("cpu", (3,)), [Replicate()])
    for other in (x[:2].to_sparse(), replicated):
        assert_fails(1, Failing(1, other), TypeError, "which the stages cannot send")
    assert_fails(0, Failing(1, torch.ones(1)), ValueError, "every micro-batch must give the same")
    assert_fails(2, Failing(0, torch.ones(())), ValueError, "without dimensions")
    # Only the first stage needs x. If its x is invalid, the others raise, too.
    bad = x[:4] if comm.rank == 0 else None
    assert_fails(0, modules[0], ValueError, "must be divisible", bad)
    for bad in (None, [1.0]):
        assert_fails(0, modules[0], TypeError, "x must be a tensor", bad if comm.rank == 0 else x)


def different_counts(comm: Communicator) -> None:
    """A stage that gets another number of micro-batches than it expects raises; then all go on."""
    mesh = line(comm)
    for counts, found_by in (((2, 2, 4), 2), ((4, 2, 4), 1), ((2, 4, 4), 1)):
        error, words = RuntimeError, f"stage {found_by} of the pipeline"
        if comm.rank == found_by:
            here, before = counts[found_by], counts[found_by - 1]
            error = ValueError
            words = f"num_microbatches is {here} on this stage and {before} on the one before"
        with pytest.raises(error, match=words):
            run(stages(3)[comm.rank], randn(8, WIDTH), mesh, counts[comm.rank])
        assert_equals_sequential(comm, mesh, stages(3), randn(6, WIDTH), 2)


class Dying(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return x


def death(comm: Communicator) -> None:
    mesh = line(comm)
    with pytest.raises(RuntimeError):
        run(Dying() if comm.rank == 1 else nn.Tanh(), randn(6, WIDTH), mesh, 3)


def test_a_killed_stage_is_an_error_on_the_others() -> None:
    run_processes(3, death, limit=LIMIT, killed=(1,))


@pytest.mark.parametrize("count", [True, False, 0, -1, 1.5, "2"])
def test_numbers_of_micro_batches_are_refused_before_any_communication(count: Any) -> None:
    message = f"num_microbatches is {count!r}; it must be an integer"
    with pytest.raises(ValueError, match=message):
        execute_pipeline(nn.Tanh(), None, num_microbatches=count, model_axis_name="pipe")
    with pytest.raises(ValueError, match=message):
        PipelineModule("pipe", count, nn.Tanh)


def bad_arguments(comm: Communicator) -> None:
    mesh, module, x = line(comm), nn.Tanh(), randn(5, 2)

    def refused(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error, match=message):
            run(*args, **kwargs)

    # The beginning of this message is that of xlstm-jax.
    message = "^Batch size 5 must be divisible by number of microbatches 3;"
    refused(ValueError, message, module, x, mesh, 3)
    refused(ValueError, "x has no dimension", module, x[0, 0], mesh, 1)
    refused(TypeError, "module must be an nn.Module, got builtin", torch.tanh, x, mesh, 1)
    with pytest.raises(TypeError, match="what module_fn returns must be an nn.Module, got int"):
        PipelineModule("pipe", 1, int, mesh=mesh)
    refused(TypeError, "mesh must be a DeviceMesh, got str", module, x, "pipe", 1)
    refused(ValueError, "there is no device mesh; pass mesh=", module, x, None, 1)
    unnamed, other = (
        init_device_mesh("cpu", (2,), mesh_dim_names=names) for names in (None, ("data",))
    )
    refused(ValueError, r"no dimension 'pipe'; its dimensions are \[\]", module, x, unnamed, 1)
    refused(ValueError, r"no dimension 'pipe'; .* \['data'\]", module, x, other, 1)
    for names, message in (("tensor", "no dimension 'tensor'"), ("pipe", "hold different stages")):
        refused(ValueError, message, module, x, mesh, 1, replicated_axis_names=[names])
    elsewhere = DeviceMesh("cpu", [0], mesh_dim_names=("pipe",))
    if comm.rank == 1:
        refused(ValueError, "rank 1 is not in the mesh", module, x, elsewhere, 1)


@pytest.mark.parametrize(
    ("body", "world_size"), [(different_counts, 3), (failures, 3), (bad_arguments, 2)]
)
def test_on_ranks(body: Callable[[Communicator], None], world_size: int) -> None:
    run_processes(world_size, body, limit=LIMIT)


def threads_of_gloo() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def destroy_group(comm: Communicator, left: str) -> None:
    """Gloo's threads end with the group, although output, module and exception are still alive, and
    at exit if it is in a reference cycle: they must end before the interpreter (pytorch#190489)."""
    import torch._dynamo  # noqa: F401 - leaves the frames of its callers in a reference cycle.

    gc.collect()
    gc.disable()
    mesh, x = line(comm), randn(6, WIDTH).requires_grad_()
    stage = PipelineModule("pipe", 3, nn.Tanh, mesh=mesh)
    kept: list[Any] = []
    if left == "exception":
        with contextlib.suppress(KeyError, RuntimeError):
            run(Failing(1) if comm.rank == 1 else nn.Tanh(), x, mesh, 3)
    else:
        kept.append(stage(x))
        kept[0].sum().backward()
    if left == "cycle":
        kept = [mesh]
        kept.append(kept)
        del kept
    del mesh
    assert threads_of_gloo()
    dist.destroy_process_group()
    if left == "cycle":
        assert threads_of_gloo()
        atexit._run_exitfuncs()
    assert not threads_of_gloo()
    with pytest.raises(RuntimeError, match="process group"):
        stage(x)


@leaves_the_group
@pytest.mark.parametrize("left", ["output", "exception", "cycle"])
def test_a_pipeline_does_not_keep_its_group_alive(left: str) -> None:
    run_processes(3, destroy_group, left, limit=LIMIT)
