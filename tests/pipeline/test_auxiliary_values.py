"""Values beside the output: attributes, auxiliary losses, metrics."""

from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import pipe_of
from torch import nn
from torch.nn import functional

from pipekernels import NoChunk, Pipe

ROWS, CHUNKS = 7, 3  # Microbatches of 3, 2 and 2 rows.
WEIGHTS = [3 / 7, 2 / 7, 2 / 7]
MODES = ("always", "except_last", "never")


class Leaves(nn.Linear):
    """Leaves an auxiliary loss in an attribute."""

    aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).tanh()
        self.aux = {"loss": y.square().mean()}
        return y


def make(kind: type[nn.Linear], **options: Any) -> Pipe:
    torch.manual_seed(0)
    return pipe_of(*(kind(4, 4).double() for _ in range(3)), chunks=CHUNKS, **options)


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * 4, dtype=torch.float64).view(ROWS, 4)


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_of_an_attribute_is_refused(tasks: str, mode: str, stage: int) -> None:
    pipe = make(Leaves, checkpoint=mode)
    output = pipe(rows())
    # torch finds the graph freed where it comes to the attribute after the pipe.
    message = r"left in an attribute.*have the layers return it|backward through the graph a second"
    with pytest.raises(RuntimeError, match=message):
        (output.sum() + pipe[stage].aux["loss"]).backward()
    pipe.zero_grad()  # Autograd may have been through the pipe before.
    pipe(rows()).sum().backward()  # The pipe is usable.
    expected = make(Leaves)
    expected(rows()).sum().backward()
    torch.testing.assert_close(grads(pipe), grads(expected), rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stage", [0, 2])
def test_an_attribute_in_a_step_is_refused(tasks: str, schedule: Any, stage: int) -> None:
    pipe = make(Leaves)

    def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
        return output.square().mean() + pipe[stage].aux["loss"]

    with pytest.raises(RuntimeError, match="left in an attribute"):
        pipe.train_step(rows(), rows(), loss, schedule=schedule)
    pipe.train_step(rows(), rows(), functional.mse_loss, schedule=schedule)


def test_scalars_of_integers_and_extras_without_a_tensor_are_refused() -> None:
    pipe = pipe_of(FunctionLayer(lambda x: (x, torch.tensor(len(x)))))
    with pytest.raises(ValueError, match=r"int64.*only scalars of a floating-point dtype"):
        pipe(torch.ones(4, 2))
    with pytest.raises(TypeError, match="what loss_fn returns beside the loss"):
        make(Leaves).train_step(rows(), rows(), lambda y, t: (y.sum(), 1.0))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_extras_of_a_loss(reduction: str, schedule: Any) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        per_row = (output - target).square().mean(1)
        value = getattr(per_row, reduction)()
        return value, {"rows": per_row, "largest": [per_row.max()], "name": None}

    pipe = make(Leaves)
    target = rows().flip(0)
    total, extras = pipe.train_step(
        rows(), target, loss, schedule=schedule, loss_reduction=reduction
    )
    per_row = (pipe.to_sequential()(rows()) - target).square().mean(1)
    torch.testing.assert_close(total, getattr(per_row, reduction)())
    torch.testing.assert_close(extras["rows"], per_row)
    weights = WEIGHTS if reduction == "mean" else [1.0] * CHUNKS
    largest = sum(w * p.max() for w, p in zip(weights, per_row.tensor_split(CHUNKS), strict=True))
    torch.testing.assert_close(extras["largest"], [largest])
    assert extras["name"] is None
    assert not extras["rows"].requires_grad


class Several(nn.Linear):
    def forward(self, x: Any, mask: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        y = super().forward(x) * scale
        return y if mask is None else y * mask


class OneOfTwo(nn.Module):
    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return value[0] * value[1]


def test_a_step_takes_named_arguments_and_a_tuple_as_one() -> None:
    torch.manual_seed(0)
    pipe = pipe_of(Several(4, 4).double(), nn.Linear(4, 4).double(), chunks=3)
    mask = torch.linspace(0, 1, ROWS, dtype=torch.float64).view(ROWS, 1)
    value = {"x": rows(), "mask": mask, "scale": 2.0}
    loss = pipe.train_step(value, rows(), functional.mse_loss)
    torch.testing.assert_close(loss, functional.mse_loss(pipe(**value), rows()).detach())
    pipe = pipe_of(OneOfTwo(), nn.Linear(4, 4).double())
    pipe.train_step((rows(), rows()), rows(), functional.mse_loss)
    with pytest.raises(KeyError):
        pipe.train_step({"x": rows(), "scale": NoChunk(rows())}, rows(), functional.mse_loss)
