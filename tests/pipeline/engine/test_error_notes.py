"""Errors of layers inside a pipe get a note that names the stage; otherwise they are unchanged."""

import traceback
from typing import Any

import pytest
import torch
from torch import nn

from pipekernels import Pipe
from pipekernels.pipeline.context import is_recomputing


class Unhappy(ArithmeticError):
    pass


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        raise ctx.error


class Fails(nn.Module):
    """Raises for the microbatch that has an entry above 2."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.when = when
        self.error = Unhappy("the layer's own words")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if x.max() <= 2:
            return y
        if self.when == ("recomputation" if is_recomputing() else "forward"):
            raise self.error
        if self.when == "hook" and y.requires_grad:
            y.register_hook(self._raise)
        if self.when == "backward" and y.requires_grad:
            y = _Raise.apply(y, self.error)
        return y

    def _raise(self, grad: torch.Tensor) -> None:
        raise self.error


def failed(pipe: Pipe, *, train: bool = False) -> Any:
    x = torch.tensor([[1.0, 1.0], [1.0, 1.0], [3.0, 1.0], [1.0, 1.0]])
    with pytest.raises(Unhappy) as caught:
        if train:
            pipe.train_step(x, None, torch.sum, schedule="zb-h1")
        else:
            pipe(x).sum().backward()
    assert (type(caught.value), str(caught.value)) == (Unhappy, "the layer's own words")
    return caught.value


def pipe_with(layer: nn.Module, checkpoint: Any = "never", **options: Any) -> Pipe:
    module = nn.Sequential(nn.Identity(), nn.Identity(), nn.Sequential(layer), nn.Linear(2, 2))
    options = {"balance": [2, 2], "devices": ["cpu"] * 2, "chunks": 4, **options}
    return Pipe(module, checkpoint=checkpoint, **options)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("when", "checkpoint"),
    [
        *(("forward", "never"), ("forward", "always"), ("recomputation", "always")),
        *(("hook", "never"), ("hook", "always"), ("backward", "always")),
    ],
)
def test_a_stage_is_named(when: str, checkpoint: Any, train: bool, tasks: str) -> None:
    error = failed(pipe_with(Fails(when), checkpoint), train=train)
    what = "forward" if when == "forward" else "backward"
    stages = "stages 0 to 1" if tasks == "fused" else "stage 1"
    assert error.__notes__ == [f"raised in the {what} of {stages}, microbatch 2 of a pipe"]
    if hasattr(error, "add_note"):
        assert error.__notes__[0] in "".join(traceback.format_exception(error))
