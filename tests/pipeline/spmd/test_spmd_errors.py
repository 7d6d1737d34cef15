"""The pipeline over a mesh dimension: exceptions, killed ranks and bad arguments."""

import os
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.ranks import run_processes
from support.spmd_cases import WIDTH, line, randn, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipekernels import Communicator, PipelineModule, execute_pipeline

pytestmark = pytest.mark.processes


class Failing(nn.Module):
    """At its second microbatch does what it is told."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._done = 0

    def forward(self, x: Tensor) -> Any:
        self._done += 1
        if self._done < 2:
            return x.sin()
        if self._what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._what == "raises":
            raise KeyError("of this stage")
        return {"no tensor": "no tensor", "another shape": x[1:]}[self._what]


FAILURES: dict[str, tuple[type[Exception], str]] = {
    "raises": (KeyError, "of this stage"),
    "no tensor": (TypeError, "what the module returns must be a tensor, or a tuple.*got str"),
    "another shape": (ValueError, r"returned .*\(shape=\(1, 6\).*; every microbatch must give"),
}


def failures(comm: Communicator, what: str) -> None:
    """The stage raises its own error; the others wait for it until its process ends."""
    if comm.rank == 1 and what in FAILURES:
        error, words = FAILURES[what]
        with pytest.raises(error, match=words):
            run(Failing(what), randn(6, WIDTH), line(comm), 3)
        return
    with pytest.raises(RuntimeError):
        run(Failing(what) if comm.rank == 1 else nn.Tanh(), randn(6, WIDTH), line(comm), 3)


@pytest.mark.parametrize("what", [*FAILURES, "dies"])
def test_a_stage_that_fails_is_an_error_on_the_others_when_it_ends(what: str) -> None:
    run_processes(3, failures, what, killed=(1,) if what == "dies" else ())


def different_counts(comm: Communicator) -> None:
    """The stage that gets another number of microbatches than it expects raises."""
    counts = 2, 4, 4
    with pytest.raises(
        ValueError if comm.rank == 1 else RuntimeError,
        match="num_microbatches is 4 on this stage and 2 on the" if comm.rank == 1 else None,
    ):
        run(nn.Tanh(), randn(8, WIDTH), line(comm), counts[comm.rank])


@pytest.mark.parametrize("count", [True, False, 0, -1, 1.5, "2"])
def test_numbers_of_micro_batches_are_refused_before_any_communication(count: Any) -> None:
    message = f"num_microbatches is {count!r}; it must be an integer"
    with pytest.raises(ValueError, match=message):
        execute_pipeline(nn.Tanh(), None, num_microbatches=count, model_axis_name="pipe")
    with pytest.raises(ValueError, match=message):
        PipelineModule("pipe", count, nn.Tanh)


def bad_arguments(comm: Communicator) -> None:
    """Each rank refuses its own, before any communication."""
    mesh, module, x = line(comm), nn.Tanh(), randn(5, 2)

    def refused(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error, match=message):
            run(*args, **kwargs)

    # The beginning of this message is that of xlstm-jax.
    message = "^Batch size 5 must be divisible by number of microbatches 3;"
    refused(ValueError, message, module, x, mesh, 3)
    refused(TypeError, "0-d tensor", module, x[0, 0], mesh, 1)
    refused(TypeError, "x must be a tensor on the first stage, got list", module, [1.0], mesh, 1)
    if comm.rank == 0:
        refused(TypeError, "x must be a tensor on the first stage", module, None, mesh, 1)
    refused(TypeError, "module must be an nn.Module, got builtin", torch.tanh, x, mesh, 1)
    with pytest.raises(TypeError, match="what module_fn returns must be an nn.Module, got int"):
        PipelineModule("pipe", 1, cast(Any, int), mesh=mesh)
    refused(TypeError, "mesh must be a DeviceMesh, got str", module, x, "pipe", 1)
    refused(ValueError, "no device mesh is active; pass mesh=", module, x, None, 1)
    unnamed, other = (
        init_device_mesh("cpu", (2,), mesh_dim_names=names) for names in (None, ("data",))
    )
    refused(ValueError, r"is 'pipe'.*the mesh, which has \[\]", module, x, unnamed, 1)
    refused(ValueError, r"is 'pipe'.*the mesh, which has \['data'\]", module, x, other, 1)
    elsewhere = DeviceMesh("cpu", [0], mesh_dim_names=("pipe",))
    if comm.rank == 1:
        refused(ValueError, "rank 1 is not in the mesh", module, x, elsewhere, 1)


@pytest.mark.parametrize(("body", "world_size"), [(different_counts, 3), (bad_arguments, 2)])
def test_on_ranks(body: Callable[[Communicator], None], world_size: int) -> None:
    run_processes(world_size, body)
