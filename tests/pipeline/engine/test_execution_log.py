"""Which way a pipe runs is logged with its reason, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.pipes import pipe_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipekernels import Communicator, Pipe, RowParallelLinear
from pipekernels.pipeline.engine.auto import SAMPLES_KEPT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "pipekernels.pipeline")
    return lambda: [record.message for record in caplog.records]


def run(*layers: nn.Module, times: int = 2, chunks: int = 2, **options: Any) -> Pipe:
    pipe = pipe_of(*layers, chunks=chunks, **options)
    for _ in range(times):
        pipe(torch.ones(4, 4)).sum().backward()
    return pipe


class Noop(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("execution", ["inline", "threads", "split"])
def test_what_the_user_asks_for(messages: Any, execution: str) -> None:
    run(nn.Linear(4, 4), nn.Linear(4, 4), execution=execution, checkpoint="never")
    why = f"execution={execution!r} asks for it"
    assert messages() == [f"a pipe of 2 stages, gpipe, 2 micro-batches: {execution} ({why})"]


def test_what_prevents_split_backwards(messages: Any) -> None:
    run(nn.Linear(4, 4), nn.Linear(4, 4), execution="split", checkpoint="always")
    assert len(messages()) == 1
    assert ": threads (execution='split' asks for it, but no backward here" in messages()[0]


def test_layers_that_are_shared(messages: Any) -> None:
    layer = nn.Linear(4, 4)
    run(layer, layer)
    assert len(messages()) == 1 and "inline (stages share a layer)" in messages()[0]


def test_collectives_in_layers(messages: Any) -> None:
    (comm,) = Communicator.threads(1)
    run(RowParallelLinear(4, 4, comm=comm), nn.Linear(4, 4))
    assert len(messages()) == 1 and "inline (layers call collectives" in messages()[0]


def test_one_micro_batch_a_mode_and_dropout_of_a_recurrent_layer(messages: Any) -> None:
    run(nn.Linear(4, 4), nn.Linear(4, 4), chunks=1)
    with Noop():
        run(nn.Linear(4, 4), nn.Linear(4, 4))

    class Recurrent(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[0]

    run(Recurrent(4, 4, 2, dropout=0.5), nn.Linear(4, 4))
    reasons = [
        "a single stage or micro-batch",
        "a mode, the profiler or hooks",
        "a recurrent layer",
    ]
    assert len(messages()) == 3
    assert all(why in text for why, text in zip(reasons, messages(), strict=True))


def test_random_numbers_of_a_layer_that_checkpoints_itself(messages: Any) -> None:
    class Checkpointed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forward = super().forward
            return checkpoint(lambda x: F.dropout(forward(x)), x, use_reentrant=False)

    run(nn.Linear(4, 4), Checkpointed(4, 4))
    assert len(messages()) == 1 and "layers draw random numbers that lanes" in messages()[0]


def test_kinds_are_named_by_what_tells_them_apart(messages: Any) -> None:
    run(nn.Linear(4, 4), nn.Linear(4, 4), times=4 + 3 * SAMPLES_KEPT, checkpoint="never")
    assert messages()
    assert messages()[0].startswith(
        "gpipe of 2 micro-batches of less than 2**4 elements, with gradients, 0 recomputed: "
    )


def test_nothing_is_logged_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    run(nn.Linear(4, 4), nn.Linear(4, 4), times=20, execution="auto")
    run(nn.Linear(4, 4), nn.Linear(4, 4), execution="threads")
    assert not caplog.records
