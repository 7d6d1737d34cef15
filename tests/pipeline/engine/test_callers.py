"""What callers do: interrupt, fork, call from several threads or from inside; their settings."""

import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from support.function_layer import FunctionLayer
from support.levels import in_gate
from support.pipes import pipe_of
from torch import nn


def test_what_a_pipe_runs_cannot_call_a_pipe(tasks: str) -> None:
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


def run_script(body: str) -> subprocess.Popen[str]:
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
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
        pipe = Pipe(nn.Sequential(*layers), [1, 2], devices=["cpu"] * 2, chunks=500)
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


def test_threads_use_one_pipe_while_it_trains(place: torch.device) -> None:
    """On a CUDA device, backwards and training steps need autograd's one thread for it."""
    pipe = pipe_of(*(nn.Linear(4, 4) for _ in range(3)), device=place, chunks=4)
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


def test_layers_see_the_callers_settings(tasks: str) -> None:
    seen: list[tuple[int, bool, bool]] = []

    def see(x: torch.Tensor) -> torch.Tensor:
        modes = torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled()
        seen.append((torch.get_num_threads(), *modes))
        return x

    pipe = pipe_of(FunctionLayer(see), FunctionLayer(see))
    threads = torch.get_num_threads()
    with torch.autocast("cpu", torch.bfloat16):
        pipe(torch.ones(2, 2))
        with torch.inference_mode():
            pipe(torch.ones(2, 2))
    assert seen == [(threads, False, False)] * 4 + [(threads, False, True)] * 4
