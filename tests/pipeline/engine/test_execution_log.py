"""Which way a pipe runs is logged with its reason, once."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import pipe_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

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


def linears() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


@pytest.mark.parametrize("execution", ["inline", "threads", "split"])
def test_what_the_user_asks_for(messages: Any, execution: str) -> None:
    run(*linears(), execution=execution, checkpoint="never")
    why = f"execution={execution!r} asks for it"
    assert messages() == [f"a pipe of 2 stages, gpipe, 2 micro-batches: {execution} ({why})"]


def with_collectives() -> list[nn.Module]:
    (comm,) = Communicator.threads(1)
    return [RowParallelLinear(4, 4, comm=comm), nn.Linear(4, 4)]


def recurrent() -> list[nn.Module]:
    lstm = nn.LSTM(4, 4, 2, dropout=0.5)
    return [nn.Sequential(lstm, FunctionLayer(lambda y: y[0])), nn.Linear(4, 4)]


def checkpointed() -> list[nn.Module]:
    return [nn.Linear(4, 4), FunctionLayer(lambda x: checkpoint(F.dropout, x, use_reentrant=False))]


NO_SPLIT = ": threads (execution='split' asks for it, but no backward here"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (linears, {"execution": "split", "checkpoint": "always"}, NO_SPLIT),
        (linears, {"chunks": 1}, "a single stage or micro-batch"),
        (lambda: [nn.Linear(4, 4)] * 2, {}, "inline (stages share a layer)"),
        (with_collectives, {}, "inline (layers call collectives"),
        (recurrent, {}, "a recurrent layer"),
        (checkpointed, {}, "layers draw random numbers that lanes"),
    ],
)
def test_what_prevents_lanes(
    messages: Any, make: Callable[[], list[nn.Module]], options: dict[str, Any], message: str
) -> None:
    run(*make(), **options)
    (text,) = messages()
    assert message in text


def test_a_mode(messages: Any) -> None:
    with FlopCounterMode(display=False):
        run(*linears())
    (text,) = messages()
    assert "a mode, the profiler or hooks" in text


def test_kinds_are_named_by_what_tells_them_apart(messages: Any) -> None:
    run(*linears(), times=4 + 3 * SAMPLES_KEPT, checkpoint="never")
    assert messages()
    assert messages()[0].startswith(
        "gpipe of 2 micro-batches of less than 2**4 elements, with gradients, 0 recomputed: "
    )


def test_nothing_is_logged_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    run(*linears(), times=20, execution="auto")
    run(*linears(), execution="threads")
    assert not caplog.records
