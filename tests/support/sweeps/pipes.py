"""Random pipes of layers that return strided tensors, views, several tensors, and skips.

``cd tests; python -m support.sweeps.pipes 10000`` compares the first 10,000 of them, in every
execution, with a loop over the same micro-batches: outputs and all gradients, bit for bit, in a
forward and a backward or a step of any schedule.
"""

import copy
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipekernels import Pipe
from pipekernels.pipeline.schedule.program import SCHEDULES
from pipekernels.skip import Namespace
from support.loops import WAYS, Loop, cut, results
from support.skip_layers import Pop, Stash

EXECUTIONS = ("inline", "threads", "split")
MODES = ("never", "except_last", "always")
Tensors = tuple[Tensor, ...]


class OnOne(nn.Module):
    """Applies a layer, or a function, to tensor ``index`` of several, each ``[rows, m, n]``."""

    def __init__(self, index: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.index = index
        self.function = function

    def forward(self, value: Any) -> Any:
        tensors = (value,) if isinstance(value, Tensor) else tuple(value)
        new = self.function(tensors[self.index])
        tensors = (*tensors[: self.index], new, *tensors[self.index + 1 :])
        return tensors[0] if len(tensors) == 1 else tensors


class Split(nn.Module):
    """Cuts the first tensor into two views, which follow the others."""

    def forward(self, value: Any) -> Any:
        tensors = (value,) if isinstance(value, Tensor) else tuple(value)
        return (*tensors[1:], *tensors[0].tensor_split(2, 2))


class Join(nn.Module):
    """Adds what the last tensor and the first have in common, in a dict from one layer to one."""

    def forward(self, value: Tensors) -> Any:
        first, *rest, last = value
        m, n = (min(a, b) for a, b in zip(first.shape[1:], last.shape[1:], strict=True))
        joined = first[:, :m, :n] + last[:, :m, :n]
        return (joined, *rest) if rest else joined


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, :, ::2] if x.shape[2] > 3 else self.lstm(x)[0]


def layer_for(draw: random.Random, tensors: Sequence[Tensor]) -> nn.Module:
    """A layer that can follow on ``tensors``."""
    if len(tensors) > 1 and draw.random() < 0.35:
        return Join()
    if len(tensors) < 3 and tensors[0].shape[2] > 1 and draw.random() < 0.25:
        return Split()
    index = draw.randrange(len(tensors))
    m, n = tensors[index].shape[1:]
    width = draw.choice([1, 2, 5, 8, 16])
    functions: list[Callable[[], Callable[[Tensor], Tensor]]] = [
        lambda: nn.Linear(n, width),
        lambda: nn.Linear(n, width, bias=False),
        lambda: nn.LayerNorm(n),
        lambda: nn.Conv1d(m, width, 1),
        lambda: Recurrent(n),
        lambda: lambda x: x.transpose(1, 2),
        lambda: lambda x: functional.gelu(x),
        lambda: lambda x: x.softmax(-1),
        lambda: lambda x: x @ x.transpose(1, 2),
        lambda: lambda x: (x * 1.5).relu_(),
        lambda: lambda x: x[:, -1:] if m > 1 else x,
        lambda: lambda x: x[:, :, ::2] if n > 1 else x,
        lambda: lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda: lambda x: x.expand(-1, 3, -1) if m == 1 else x,
        lambda: lambda x: x.unfold(1, 2, 1)[..., 0] if m > 1 else x,
    ]
    return OnOne(index, draw.choice(functions)())


def first_of(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def add_to_first(value: Any, skip: Tensor) -> Any:
    """Adds the mean of each row of a skip."""
    first = first_of(value) + skip.mean((1, 2), keepdim=True)
    return first if isinstance(value, Tensor) else (first, *value[1:])


def input_for(draw: random.Random) -> Tensor:
    """``[rows, m, n]``, of various strides."""
    rows, m, n = draw.randint(1, 7), draw.randint(1, 6), draw.randint(1, 9)
    kind = draw.randrange(5)
    if kind == 0:
        return torch.randn(m, rows, n).transpose(0, 1)
    if kind == 1:
        return torch.randn(rows, n, m).transpose(1, 2)
    if kind == 2:
        return torch.randn(rows, m, 2 * n)[:, :, 1::2]
    if kind == 3:
        return torch.randn(2 * rows + 1, m, n)[1::2]
    return torch.randn(rows, m, n)


def case(seed: int) -> tuple[nn.Sequential, Tensor, str, dict[str, Any]]:
    """Layers, an input, the way to run them, and how to cut both."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    x = input_for(draw)
    value: Any = x
    layers: list[nn.Module] = []
    skips: list[Namespace] = []
    for _ in range(draw.randint(2, 7)):
        if draw.random() < 0.15:
            skips.append(Namespace())
            layers.append(Stash(value=lambda value: first_of(value).sin()).isolate(skips[-1]))
        elif skips and draw.random() < 0.3:
            layers.append(Pop(join=add_to_first).isolate(skips.pop(draw.randrange(len(skips)))))
        else:
            layers.append(layer_for(draw, (value,) if isinstance(value, Tensor) else value))
            value = layers[-1](value)
    layers += [Pop(join=add_to_first).isolate(skip) for skip in skips]
    if not any(p.requires_grad for layer in layers for p in layer.parameters()):
        tensors = (value,) if isinstance(value, Tensor) else value
        layers.append(OnOne(0, nn.Linear(tensors[0].shape[2], 3)))
    stages = draw.randint(1, min(4, len(layers)))
    cuts = sorted(draw.sample(range(1, len(layers)), stages - 1))
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    options = {
        "balance": balance,
        "devices": ["cpu"] * stages,
        "chunks": draw.randint(1, 4),
        "checkpoint": draw.choice(MODES),
    }
    x.requires_grad_(draw.random() < 0.7)
    return nn.Sequential(*layers), x, draw.choice(WAYS), options


def differs(seed: int) -> str | None:
    """How a pipe differs from the loop, if it does."""
    module, x, way, options = case(seed)
    close = {"rtol": 0.0, "atol": 0.0}
    if way in SCHEDULES:
        # The loss of a step has a graph of its own. So a stage's backward begins at each of several
        # outputs, and what several paths add to a gradient comes in another order.
        module, x = module.double(), x.detach().double().requires_grad_(x.requires_grad)
        close = {"rtol": 1e-10, "atol": 1e-10}
    balance, chunks = options["balance"], options["chunks"]
    loop, plain = Loop(cut(module, balance), chunks), copy.deepcopy(module)
    expected = results(loop, way, [x], module, len(balance))
    for execution in EXECUTIONS:
        own = copy.deepcopy(plain)
        pipe = Pipe(own, **options, execution=execution)
        for call in range(2):
            found = results(pipe, way, [x], own, len(balance))
            try:
                torch.testing.assert_close(found, expected, **close)
            except AssertionError as error:
                return f"case {seed}, {way}, {execution}, call {call}: {error} {options}"
    return None


def main(count: int) -> None:
    torch.set_num_threads(1)
    found = [text for seed in range(count) if (text := differs(seed)) is not None]
    print("\n".join(found[:20]))
    print(f"{count} pipes, {len(EXECUTIONS)} executions each, {len(found)} differ")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
