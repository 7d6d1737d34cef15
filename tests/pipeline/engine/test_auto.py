"""The choice of the execution follows measured times, and is logged with its reason, once."""

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
from pipekernels.pipeline.engine.execution import FIRST
from pipekernels.pipeline.engine.trials import TRIALS, Auto, Signature
from pipekernels.pipeline.schedule import GPIPE

pytestmark = pytest.mark.usefixtures("one_thread")

EXECUTIONS = ["inline", "threads"]
KIND = "gpipe of 2 microbatches of less than 2**4 elements, with gradients, 0 recomputed"


def make() -> Auto:
    return Auto(Signature(GPIPE, 2, 4, True, (True,), 0, False))


def choices(auto: Auto, times: int, **seconds: float) -> list[str]:
    """The executions that ``auto`` chooses for so many mini-batches."""
    chosen = []
    for _ in range(times):
        execution = auto.choose()
        auto.record(execution, seconds.get(execution, 1e-9))
        chosen.append(execution)
    return chosen


def test_the_first_mini_batch_warms_up_and_is_not_counted() -> None:
    auto = make()
    assert auto.choose() == FIRST
    assert auto.choose() == FIRST  # None has ended.
    auto.record(FIRST, 1e-9)
    chosen = choices(auto, 2 * TRIALS, inline=2.0, threads=1.0)
    assert chosen == EXECUTIONS * TRIALS
    assert auto.choose() == "threads"


@pytest.mark.parametrize("fastest", EXECUTIONS)
def test_the_fastest_execution_is_kept_for_good(fastest: str) -> None:
    auto = make()
    seconds = {execution: 1.0 if execution == fastest else 1.01 for execution in EXECUTIONS}
    choices(auto, 1 + 2 * TRIALS, **seconds)
    slower = {execution: 3 - time for execution, time in seconds.items()}
    assert set(choices(auto, 100, **slower)) == {fastest}


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipekernels.pipeline")
    auto = make()
    choices(auto, 2 * TRIALS, inline=2e-3, threads=1e-3)
    assert not caplog.messages
    choices(auto, 100, inline=2e-3, threads=1e-3)
    assert caplog.messages == [f"{KIND}: threads, the fastest (inline 2 ms, threads 1 ms)"]


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


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_what_the_user_asks_for(messages: Any, execution: str) -> None:
    run(*linears(), execution=execution, checkpoint="never")
    why = f"execution={execution!r} asks for it"
    assert messages() == [f"a pipe of 2 stages, gpipe, 2 microbatches: {execution} ({why})"]


def with_collectives() -> list[nn.Module]:
    (comm,) = Communicator.threads(1)
    return [RowParallelLinear(4, 4, comm=comm), nn.Linear(4, 4)]


def recurrent() -> list[nn.Module]:
    lstm = nn.LSTM(4, 4, 2, dropout=0.5)
    return [nn.Sequential(lstm, FunctionLayer(lambda y: y[0])), nn.Linear(4, 4)]


def checkpointed() -> list[nn.Module]:
    return [nn.Linear(4, 4), FunctionLayer(lambda x: checkpoint(F.dropout, x, use_reentrant=False))]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (linears, {"chunks": 1}, "a single stage or microbatch"),
        (lambda: [nn.Linear(4, 4)] * 2, {}, "inline (stages share a layer)"),
        (with_collectives, {}, "inline (layers call collectives"),
        (recurrent, {}, "layers draw random numbers that workers"),
        (checkpointed, {}, "layers draw random numbers that workers"),
    ],
)
def test_what_prevents_workers(
    messages: Any, make: Callable[[], list[nn.Module]], options: dict[str, Any], message: str
) -> None:
    run(*make(), **options)
    with FlopCounterMode(display=False):
        run(*linears())
    text, in_a_mode = messages()
    assert message in text and "a mode, the profiler or hooks" in in_a_mode
