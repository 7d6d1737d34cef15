"""Lanes: exceptions, interrupts, threads, forks, and the caller's context."""

import contextvars
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.levels import in_gate
from support.pipes import pipe_of
from torch import nn

from pipekernels.pipeline.engine.workers import intra_op_threads


def test_what_a_pipe_runs_cannot_call_a_pipe(execution: str) -> None:
    """A layer, a loss, or a hook in a backward: itself, or one that no layer holds, or one does."""
    called: list[nn.Module] = []  # Not submodules.
    calls = FunctionLayer(lambda x: x + called[0](x))
    hooks = FunctionLayer(lambda x: (x.register_hook(lambda grad: called[0](grad)), x)[1])
    other = pipe_of(nn.Linear(2, 2), nn.Tanh())
    pipe, hooked = pipe_of(nn.Linear(2, 2), calls), pipe_of(nn.Linear(2, 2), hooks)
    x = torch.ones(4, 2)
    for called[:] in ([pipe], [other], [hooked]):
        for call in (
            lambda: pipe(x),
            lambda: pipe.train_step(x, x, nn.functional.mse_loss),
            lambda: hooked(x).sum().backward(),
            lambda: hooked.train_step(x, None, lambda y: called[0](y).sum()),
        ):
            with pytest.raises(RuntimeError, match="of a pipe calls a pipe"):
                call()
    with pytest.raises(TypeError, match=r"holds a Pipe.*to_sequential\(\)"):
        pipe_of(nn.Linear(2, 2), nn.Sequential(other))
    pipe.partitions[1][0] = nn.Sequential(other)
    with pytest.raises(RuntimeError, match=r"calls a pipe.*to_sequential\(\)"):
        pipe(x)


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
        out, err = process.communicate()
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
def test_pipes_share_threads_and_a_forked_child_starts_workers_of_its_own() -> None:
    """And the interpreter exits."""
    script = """
        before = threading.active_count()
        for _ in range(50):
            pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)),
                        [1, 1, 1], devices=["cpu"] * 3, chunks=2, execution="threads")
            pipe(torch.ones(4, 2)).sum().backward()
        print(threading.active_count() - before, flush=True)
        with torch.no_grad():
            child = os.fork()
            if child == 0:
                print(tuple(pipe(torch.ones(4, 2)).shape), flush=True)
                os._exit(0)
        print(os.waitpid(child, 0)[1])
        """
    out = finish(run_script(script, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    assert out == "2\n(4, 2)\n0\n"


@pytest.mark.parametrize("options", [{}, {"execution": "auto"}])
def test_threads_use_one_pipe_while_it_trains(options: dict[str, Any], place: torch.device) -> None:
    """On a CUDA device, backwards and training steps need autograd's one thread for it."""
    pipe = pipe_of(*(nn.Linear(4, 4) for _ in range(3)), device=place, chunks=4, **options)
    x, weight = torch.randn(8, 4), pipe[0].weight
    (expected,) = torch.autograd.grad(pipe(x).sum(), weight)
    right: list[bool] = []

    def work() -> None:
        for _ in range(20):
            (grad,) = torch.autograd.grad(pipe(x).sum(), weight)
            right.append(torch.equal(grad, expected))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        pipe.train_step(x, None, torch.sum, loss_reduction="sum")
    for thread in threads:
        thread.join()
    assert right == [True] * 60


def test_workers_see_the_callers_context(execution: str) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[int, bool, bool]] = []

    def see(x: torch.Tensor) -> torch.Tensor:
        modes = torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled()
        seen.append((variable.get(), *modes))
        return x

    pipe = pipe_of(FunctionLayer(see), FunctionLayer(see))
    token = variable.set(5)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        pipe(torch.ones(2, 2))
        with torch.inference_mode():
            pipe(torch.ones(2, 2))
    variable.reset(token)
    assert seen == [(5, False, False)] * 4 + [(5, False, True)] * 4


@pytest.mark.parametrize(("chunks", "share"), [(2, 3), (8, 2)])
def test_workers_share_the_intra_op_threads(chunks: int, share: int, execution: str) -> None:
    """At most as many workers as there are microbatches run at once, and share the threads."""
    seen: list[int] = []
    count = lambda x: (seen.append(torch.get_num_threads()), x)[1]
    pipe = pipe_of(*(FunctionLayer(count) for _ in range(3)), chunks=chunks)
    with intra_op_threads(6):
        pipe(torch.ones(8, 2))
    assert seen == [share] * 3 * chunks
