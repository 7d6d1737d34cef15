"""A pipe has the bits of the plain loop over its microbatches, and the results of the model.

Every schedule, mode of checkpointing and place, with models of all kinds of values.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.levels import pairwise
from support.loops import WAYS, Loop, cut, loss_of, results
from support.pipe_models import CHUNKS, MODELS, Model
from support.ranks import run_processes
from support.spmd_cases import line, run
from torch import nn

from pipekernels import Communicator, Pipe, move_to_device
from pipekernels.pipeline.context import MODES

pytestmark = pytest.mark.usefixtures("one_thread")

# Whether one task runs all stages, or each is shown and so has its own.
SHOWN = (False, True)


def loop_of(model: Model, dtype: torch.dtype, chunks: int = CHUNKS) -> tuple[Loop, nn.Sequential]:
    module = model.build(dtype)
    dim, copies = model.options.get("batch_dim", 0), model.writes_to_inputs
    return Loop(cut(module, model.balance), chunks, dim, copies=copies), module


def autocast(model: Model) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if model.autocast else nullcontext()


@pytest.mark.parametrize(
    *pairwise(name=list(MODELS), way=WAYS, is_shown=SHOWN, checkpoint=MODES, threads=[1, 2])
)
def test_bits_of_the_loop(
    name: str, way: str, is_shown: bool, checkpoint: Any, threads: int
) -> None:
    """Twice, as the second mini-batch reuses what the first has made."""
    torch.set_num_threads(threads)
    model = MODELS[name]
    dtype = torch.float64 if model.has_sums else torch.float32
    args, stages = model.inputs(dtype), len(model.balance)
    loop, plain = loop_of(model, dtype)
    with autocast(model):
        expected = [results(loop, way, args, plain, stages, model.loss) for _ in range(2)]
    module = model.build(dtype)
    pipe = Pipe(
        module, model.balance, devices=["cpu"] * stages, chunks=CHUNKS, checkpoint=checkpoint,
        **model.options,
    )  # fmt: skip
    with autocast(model), pipe.timeline() if is_shown else nullcontext():
        found = [results(pipe, way, args, module, stages, model.loss) for _ in range(2)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 if model.has_sums else 0)


SUMMED = [name for name, model in MODELS.items() if model.has_sums]


@pytest.mark.parametrize(*pairwise(name=SUMMED, way=WAYS, checkpoint=MODES))
def test_bits_of_gradients_that_are_sums(name: str, way: str, checkpoint: Any) -> None:
    """They are the same while a timeline records."""
    model, found = MODELS[name], []
    for is_shown in SHOWN:
        module, args = model.build(torch.float32), model.inputs(torch.float32)
        pipe = Pipe(
            module, model.balance, devices=["cpu"] * len(model.balance), chunks=CHUNKS,
            checkpoint=checkpoint,
        )  # fmt: skip
        with pipe.timeline() if is_shown else nullcontext():
            runs = [results(pipe, way, args, module, len(model.balance)) for _ in range(2)]
        found.append(runs)
    torch.testing.assert_close(*found, rtol=0, atol=0)


BY_ROW = [name for name, model in MODELS.items() if model.is_by_row]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_ROW)
def test_equals_the_model(name: str, way: str, device: torch.device) -> None:
    model = MODELS[name]
    args, stages = model.inputs(torch.float64), len(model.balance)
    plain, reference = loop_of(model, torch.float64, 1)  # The whole batch is one microbatch.
    outputs, flags, grads, *_ = results(plain, way, args, reference, stages)
    module = model.build(torch.float64)
    pipe = Pipe(module, model.balance, devices=[device] * stages, chunks=CHUNKS, **model.options)
    for _ in range(2):
        found = results(pipe, way, [move_to_device(arg, device) for arg in args], module, stages)
        torch.testing.assert_close(
            found[:3], [outputs, flags, grads], rtol=0, atol=1e-10, check_device=False
        )


def on_rank(comm: Communicator) -> None:
    for name in ("tensors", "frozen", "dropout", "batch norm", "deferred batch norm"):
        model = MODELS[name]
        (x,) = model.inputs(torch.float32)
        plain = model.build(torch.float32)
        reference = cut(plain, model.balance)
        stage = cut(model.build(torch.float32), model.balance)[comm.rank]
        loop, x = Loop(reference, CHUNKS), x[: 2 * CHUNKS]
        outputs, _, (x_grad, *_), *_, drawn = results(
            loop, "forward", [x.detach().requires_grad_()], plain, 4
        )
        x = x.detach().requires_grad_()
        torch.manual_seed(7)  # As in results().
        output = run(stage, x, line(comm), CHUNKS)
        assert torch.equal(torch.rand(2), drawn)  # The stages leave the caller's generator alone.
        loss_of(output).backward()
        if comm.rank == 3:
            assert torch.equal(output, *outputs)
        if comm.rank == 0:
            assert torch.equal(x.grad, x_grad)
        found, expected = (
            [*(p.grad for p in module.parameters()), *module.buffers()]
            for module in (stage, reference[comm.rank])
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.processes
def test_stages_on_a_process_each_have_the_bits_of_the_loop() -> None:
    run_processes(4, on_rank)
