"""What callers do: call from several threads, or from inside."""

import threading

import pytest
import torch
from support.function_layer import FunctionLayer
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


def test_threads_use_one_pipe_while_it_trains(place: torch.device) -> None:
    """On a CUDA device, backwards and training steps need autograd's one thread for it."""
    pipe = pipe_of(*(nn.Linear(4, 4) for _ in range(3)), device=place, chunks=4)
    x, weight = torch.randn(8, 4), pipe.get_parameter("partitions.0.0.weight")
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
