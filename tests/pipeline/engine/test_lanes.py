"""Lanes: exceptions, interrupts, threads, forks, and the caller's context."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.levels import in_gate
from support.pipes import Pipe, pipe_of
from torch import nn

from pipekernels.pipeline.engine import lanes, mini_batch, stages
from pipekernels.pipeline.engine.lanes import intra_op_threads
from pipekernels.pipeline.engine.transport import Transport


class Fails(nn.Module):
    """Raises in the forward or backward of one micro-batch."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.when == "forward" and self.calls == 2:
            raise ZeroDivisionError("the second micro-batch")
        y = x * 1
        if self.when == "backward" and x.requires_grad and self.calls == 2:
            y.register_hook(self._raise)
        return y

    def _raise(self, grad):
        raise ZeroDivisionError("the second micro-batch")


class Calls(nn.Module):
    """Adds to its input the results of the modules in ``called``."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[nn.Module] = []  # A list, so that they are not submodules.

    def forward(self, x):
        for module in self.called:
            x = x + module(x)
        return x


@pytest.mark.timeout(60)
def test_a_layer_cannot_call_its_own_pipe(execution: str) -> None:
    calls = Calls()
    pipe, other = pipe_of(nn.Linear(2, 2), calls), pipe_of(nn.Linear(2, 2), nn.Tanh())
    x = torch.ones(4, 2)
    calls.called = [pipe]
    for step in (pipe, lambda x: pipe.train_step(x, x, nn.functional.mse_loss)):
        with pytest.raises(RuntimeError, match="calls the pipe that it is in"):
            step(x)
    calls.called = [other]
    y = pipe[0](x)
    torch.testing.assert_close(pipe(x), y + other(y))


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_reaches_the_caller_and_the_pipe_stays_usable(
    when: str, stage: int, execution: str
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    fails = Fails(when)
    stages = [nn.Sequential(layer) for layer in layers]
    stages[stage].append(fails)
    module = nn.Sequential(*stages)
    weights = [layer.weight for layer in layers]
    pipe = Pipe(module, [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint="never")
    x = torch.randn(8, 4)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="the second micro-batch") as caught:
        pipe(x).sum().backward()
    frames = {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert ("forward" if when == "forward" else "_raise") in frames

    assert all(layer.weight is weight for layer, weight in zip(layers, weights, strict=True))
    fails.when = "never"
    torch.set_rng_state(state)
    pipe.zero_grad()
    output = pipe(x)
    output.sum().backward()
    grads = [weight.grad.clone() for weight in weights]
    module.zero_grad()
    module(x).sum().backward()
    for grad, weight in zip(grads, weights, strict=True):
        torch.testing.assert_close(grad, weight.grad)


def run_script(body: str, **kwargs: object) -> subprocess.Popen[str]:
    script = textwrap.dedent(
        """
        import os, signal, sys, threading, time
        import torch
        from torch import nn
        from pipekernels import Pipe
        """
    ) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out


@pytest.mark.processes
@pytest.mark.parametrize("slow_stage", in_gate([1], [0, 1]))
def test_ctrl_c_ends_a_run(slow_stage: int) -> None:
    process = run_script(
        f"""
        class Slow(nn.Module):
            def forward(self, x):
                print("running", flush=True)
                time.sleep(0.2)
                return x

        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        layers.insert({slow_stage} * 2, Slow())
        pipe = Pipe(nn.Sequential(*layers), [1, 2], devices=["cpu"] * 2, chunks=500,
                    execution="threads")
        begin = time.monotonic()
        try:
            pipe(torch.ones(500, 2))  # 100 s.
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - begin < 50)
        pipe.chunks = 1
        print(pipe(torch.ones(1, 2)).shape)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    lines = finish(process).split("\n")
    assert "interrupted True" in lines
    assert lines[-2] == "torch.Size([1, 2])"


@pytest.mark.processes
def test_the_interpreter_exits_and_pipes_share_threads() -> None:
    out = finish(
        run_script(
            """
            before = threading.active_count()
            for _ in range(50):
                pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)),
                            [1, 1, 1], devices=["cpu"] * 3, chunks=2, execution="threads")
                pipe(torch.ones(4, 2)).sum().backward()
            print(threading.active_count() - before)
            """
        )
    )
    assert out == "2\n"


@pytest.mark.processes
def test_a_forked_child_starts_lanes_of_its_own() -> None:
    out = finish(
        run_script(
            """
            pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1],
                        devices=["cpu"] * 2, chunks=2, execution="threads")
            with torch.no_grad():
                pipe(torch.ones(4, 2))
                child = os.fork()
                if child == 0:
                    print(tuple(pipe(torch.ones(4, 2)).shape), flush=True)
                    os._exit(0)
            print(os.waitpid(child, 0)[1])
            """,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    )
    assert out == "(4, 2)\n0\n"


def test_two_threads_may_use_one_pipe() -> None:
    pipe = pipe_of(nn.Linear(4, 4), nn.Linear(4, 4), chunks=4)
    x, weight = torch.randn(8, 4), pipe[0].weight
    (expected,) = torch.autograd.grad(pipe(x).sum(), weight)
    right: list[bool] = []

    def work() -> None:
        for _ in range(20):
            (grad,) = torch.autograd.grad(pipe(x).sum(), weight)
            right.append(torch.equal(grad, expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert right == [True] * 60


def test_backwards_and_training_steps_at_the_same_time(place: torch.device) -> None:
    """On a CUDA device both need autograd's one thread for it."""
    pipe = pipe_of(*(nn.Linear(4, 4) for _ in range(3)), device=place, chunks=4)
    x, weight = torch.randn(8, 4), pipe[0].weight
    (expected,) = torch.autograd.grad(pipe(x).sum(), weight)
    right: list[bool] = []

    def work() -> None:
        for _ in range(20):
            (grad,) = torch.autograd.grad(pipe(x).sum(), weight)
            right.append(torch.equal(grad, expected))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for _ in range(20):
        pipe.train_step(x, None, torch.sum, loss_reduction="sum")
    thread.join(timeout=60)
    assert right == [True] * 20


@pytest.mark.slow
def test_a_forward_during_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device, a step releases the lock while it waits for autograd's thread."""

    class WithoutStreams(Transport):
        def __init__(self, devices: list[torch.device]) -> None:
            super().__init__([])

        def phase(self) -> AbstractContextManager[None]:
            return nullcontext()

    monkeypatch.setattr(stages, "has_streams", lambda device: True)
    monkeypatch.setattr(mini_batch, "Transport", WithoutStreams)
    pipe = pipe_of(nn.Linear(4, 4), nn.Tanh())
    x, parameters = torch.randn(8, 4), list(pipe.parameters())
    expected = torch.autograd.grad(pipe(x).sum(), parameters)
    found: list[tuple[torch.Tensor, ...]] = []
    thread = threading.Thread(
        target=lambda: found.append(torch.autograd.grad(pipe(x).sum(), parameters)), daemon=True
    )

    class Begins(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if not thread.ident:
                thread.start()
                thread.join(1.0)
            return grad

    pipe.train_step(x, None, lambda output: Begins.apply(output).sum(), loss_reduction="sum")
    thread.join(60)
    assert len(found) == 1
    for grad, other, parameter in zip(found[0], expected, parameters, strict=True):
        assert torch.equal(grad, other) and torch.equal(parameter.grad, other)


def test_lanes_run_at_the_same_time() -> None:
    class Sleep(nn.Module):
        def forward(self, x):
            time.sleep(0.02)
            return x

    pipe = pipe_of(Sleep(), Sleep(), chunks=8, execution="threads")
    with pipe.timeline() as timeline:
        pipe(torch.ones(8, 2))
    (phase,) = timeline.phases
    overlaps = [
        (a, b)
        for a in phase.events
        for b in phase.events
        if a.action.stage < b.action.stage and a.start < b.end and b.start < a.end
    ]
    assert len(overlaps) >= 4


def test_intra_op_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), intra_op_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_lanes_see_the_callers_context(execution: str) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[int, bool]] = []

    class SeesContext(nn.Module):
        def forward(self, x):
            seen.append((variable.get(), torch.is_autocast_cache_enabled()))
            return x

    pipe = pipe_of(SeesContext(), SeesContext())
    token = variable.set(5)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        pipe(torch.ones(2, 2))
    variable.reset(token)
    assert seen == [(5, False)] * 4


@pytest.mark.parametrize(("chunks", "share"), [(2, 3), (8, 2)])
def test_lanes_share_the_intra_op_threads(chunks: int, share: int, execution: str) -> None:
    """At most as many lanes as there are micro-batches run at once, and share the threads."""
    seen: list[int] = []

    class Count(nn.Module):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return x

    pipe = pipe_of(Count(), Count(), Count(), chunks=chunks)
    with intra_op_threads(6):
        pipe(torch.ones(8, 2))
    assert seen == [share] * 3 * chunks


def test_ctrl_c_while_work_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, calls = lanes._Worker.submit, []

    def interrupted(self: lanes._Worker, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        submit(self, *args)

    monkeypatch.setattr(lanes._Worker, "submit", interrupted)
    pipe = pipe_of(*(nn.Linear(2, 2) for _ in range(3)), execution="threads")
    caught: list[BaseException] = []

    def work() -> None:
        try:
            pipe(torch.ones(4, 2))
        except KeyboardInterrupt as error:
            caught.append(error)
        pipe(torch.ones(4, 2))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and len(caught) == 1
