"""The numbers of activations that a pipe holds, and the lifetime of its tensors."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.pipes import pipe_of
from torch import nn

from pipekernels.pipeline.engine import engine
from pipekernels.pipeline.engine.mini_batch_run import MiniBatchRun

Runs = list[weakref.ref[MiniBatchRun]]


class Token:
    """Lives as long as the activations of a microbatch."""


class Held(nn.Module):
    """A linear layer that counts the microbatches whose activations it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.live: weakref.WeakSet[Token] = weakref.WeakSet()
        self.peak = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token = Token()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, token), lambda saved: saved[0]):
            y = self.layer(x)
        if y.requires_grad:
            self.live.add(token)
            self.peak = max(self.peak, len(self.live))
        return y


@pytest.mark.parametrize(
    ("schedule", "limits"), [("gpipe", (9, 9, 9)), ("1f1b", (3, 2, 1)), ("zb-h1", (3, 3, 3))]
)
def test_activations_in_flight(schedule: Any, limits: tuple[int, ...], place: torch.device) -> None:
    stages = [Held() for _ in limits]
    pipe = pipe_of(*stages, device=place, chunks=9, checkpoint="never")
    with pipe.timeline():  # Prevents that stages are fused.
        pipe.train_step(
            torch.randn(18, 4), None, torch.sum, schedule=schedule, loss_reduction="sum"
        )
    assert all(0 < stage.peak <= limit for stage, limit in zip(stages, limits, strict=True))
    assert schedule != "gpipe" or stages[0].peak == 9
    assert not any(stage.live for stage in stages)


def peaks(checkpoint: Any, place: torch.device) -> list[int]:
    """Per stage, the most microbatches whose activations it held at once."""
    stages = [Held() for _ in range(3)]
    pipe = pipe_of(*stages, device=place, chunks=9, checkpoint=checkpoint)
    with pipe.timeline():
        pipe(torch.randn(18, 4)).sum().backward()
    assert not any(stage.live for stage in stages)
    return [stage.peak for stage in stages]


def test_checkpointing_holds_one_micro_batch_at_a_time(place: torch.device) -> None:
    assert peaks("never", place) == [9, 9, 9]
    assert peaks("always", place) == [1, 1, 1]
    # Only the last microbatch keeps its activations, and its backward is the first.
    assert peaks("except_last", place) == [1, 1, 1]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """All mini-batches of all pipes; the garbage collector is disabled meanwhile."""
    found: Runs = []

    class Recorded(MiniBatchRun):
        def __init__(self, **args: Any) -> None:
            super().__init__(**args)
            found.append(weakref.ref(self))

    monkeypatch.setattr(engine, "MiniBatchRun", Recorded)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_mini_batch_is_freed_at_once(schedule: Any, place: torch.device, runs: Runs) -> None:
    """It is in no reference cycle, which would be freed later."""
    pipe = pipe_of(nn.Linear(4, 4), nn.Tanh(), device=place, chunks=4)
    pipe(torch.randn(8, 4)).sum().backward()
    pipe.train_step(torch.randn(8, 4), None, torch.sum, schedule=schedule, loss_reduction="sum")
    assert [run() for run in runs] == [None, None]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("when", ["forward", "backward", "forward of a step", "backward of a step"])
def test_a_failed_mini_batch_is_freed_with_its_exception(
    when: str, checkpoint: Any, error: type[BaseException], tasks: str, runs: Runs
) -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            tensors.extend((weakref.ref(x), weakref.ref(y)))
            if when.startswith("forward"):
                raise error
            if y.requires_grad:
                y.register_hook(fail)
            return y

    def fail(grad: torch.Tensor) -> None:
        tensors.append(weakref.ref(grad))
        raise error

    pipe = pipe_of(nn.Linear(4, 4), Fails(), checkpoint=checkpoint)

    def run() -> None:
        if "step" in when:
            pipe.train_step(torch.randn(4, 4), None, torch.sum)
        else:
            pipe(torch.randn(4, 4)).sum().backward()

    with contextlib.suppress(error):
        run()
    assert [run() for run in runs] == [None]
    assert len(tensors) > 1 and not any(tensor() is not None for tensor in tensors)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_output_keeps_nothing_after_backward(dim: int, checkpoint: Any, tasks: str) -> None:
    """For example, if losses are summed over an epoch with their graphs."""
    pipe = pipe_of(nn.Linear(4, 4), nn.Tanh(), checkpoint=checkpoint, batch_dim=dim)
    tensors: list[weakref.ref[torch.Tensor]] = []
    pipe[0].register_forward_pre_hook(lambda _, args: tensors.append(weakref.ref(args[0])))
    x = torch.randn(6, 6, 4, requires_grad=True)
    output = pipe(x)
    grad = torch.ones_like(output)
    output.backward(grad)
    assert all(tensor() is None for tensor in tensors)
    for kept in (x, grad):
        assert torch._C._storage_Use_Count(kept.untyped_storage()._cdata) == 2
