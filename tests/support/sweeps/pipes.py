"""Random pipes of layers that return strided tensors, views, containers and skips, draw random
numbers, normalise batches and share parameters.

They are compared with a loop over the same microbatches: outputs, all gradients and buffers, bit
for bit, in two forwards and backwards or steps of any schedule. So are pipes with a timeline, which
run each stage by itself.
"""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipekernels import Pipe
from pipekernels.batchnorm import convert_deferred_batch_norm
from pipekernels.pipeline.schedule import SCHEDULES
from pipekernels.skip import Namespace
from support.loops import WAYS, Loop, cut, leaves_of, results
from support.skip_layers import Pop, Stash

MODES = ("never", "except_last", "always")


def tensors_of(value: Any) -> list[Tensor]:
    return leaves_of(value, Tensor)


def packed(tensors: Sequence[Tensor], container: int = 0) -> Any:
    """``tensors`` in a tuple or, if there is only one, alone; or in other containers."""
    if container == 1:
        return list(tensors)
    if container == 2:
        return {"first": tensors[0], "rest": [None, len(tensors), tuple(tensors[1:])]}
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


class OnOne(nn.Module):
    """Applies a layer, or a function, to tensor ``index`` of several, each ``[rows, m, n]``."""

    def __init__(
        self, index: int, function: Callable[[Tensor], Tensor], container: int = 0
    ) -> None:
        super().__init__()
        self.index, self.container = index, container
        self.function = function

    def forward(self, value: Any) -> Any:
        tensors = tensors_of(value)
        tensors[self.index] = self.function(tensors[self.index])
        return packed(tensors, self.container)


class Split(nn.Module):
    """Cuts the first tensor into two views, which follow the others."""

    def forward(self, value: Any) -> Any:
        first, *rest = tensors_of(value)
        return (*rest, *first.tensor_split(2, 2))


class Join(nn.Module):
    """Adds what the last tensor and the first have in common."""

    def forward(self, value: Any) -> Any:
        first, *rest, last = tensors_of(value)
        m, n = (min(a, b) for a, b in zip(first.shape[1:], last.shape[1:], strict=True))
        return packed([first[:, :m, :n] + last[:, :m, :n], *rest])


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, :, ::2] if x.shape[2] > 3 else self.lstm(x)[0]


def layer_for(
    draw: random.Random, tensors: Sequence[Tensor], made: Sequence[nn.Module]
) -> nn.Module:
    """A layer that can follow on ``tensors``, and may be one of ``made`` or share its weight."""
    if len(tensors) > 1 and draw.random() < 0.35:
        return Join()
    if len(tensors) < 3 and tensors[0].shape[2] > 1 and draw.random() < 0.25:
        return Split()
    index = draw.randrange(len(tensors))
    m, n = tensors[index].shape[1:]
    width = draw.choice([1, 2, 5, 8, 16, 64])
    known = [each for each in made if isinstance(each, nn.Linear) and each.in_features == n]
    if known and draw.random() < 0.4:
        shared = tied = draw.choice(known)
        if draw.random() < 0.7:
            tied = nn.Linear(n, shared.out_features)
            tied.weight = shared.weight
        return OnOne(index, tied)
    functions: list[Callable[[], Callable[[Tensor], Tensor]]] = [
        lambda: nn.Linear(n, width),
        lambda: nn.Linear(n, width, bias=False),
        lambda: nn.LayerNorm(n),
        lambda: nn.Conv1d(m, width, 1),
        lambda: Recurrent(n),
        lambda: nn.Dropout(0.4),
        lambda: lambda x: x * torch.rand_like(x),
        lambda: nn.BatchNorm1d(m) if n > 1 else nn.Identity(),
        lambda: nn.BatchNorm1d(m, momentum=None) if n > 1 else nn.Identity(),
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
    function = draw.choice(functions)()
    if isinstance(function, nn.Module) and draw.random() < 0.1:
        function.requires_grad_(False)
    return OnOne(index, function, draw.randrange(3))


def add_to_first(value: Any, skip: Tensor) -> Any:
    """Adds the mean of each row of a skip."""
    first, *rest = tensors_of(value)
    return packed([first + skip.mean((1, 2), keepdim=True), *rest])


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
            stash = Stash(value=lambda value: tensors_of(value)[0].sin())
            layers.append(stash.isolate(skips[-1]))
        elif skips and draw.random() < 0.3:
            layers.append(Pop(join=add_to_first).isolate(skips.pop(draw.randrange(len(skips)))))
        else:
            made = [each for layer in layers for each in layer.children()]
            layers.append(layer_for(draw, tensors_of(value), made))
            value = layers[-1](value)
    layers += [Pop(join=add_to_first).isolate(skip) for skip in skips]
    if not any(p.requires_grad for layer in layers for p in layer.parameters()):
        layers.append(OnOne(0, nn.Linear(tensors_of(value)[0].shape[2], 3)))
    stages = draw.randint(1, min(4, len(layers)))
    cuts = sorted(draw.sample(range(1, len(layers)), stages - 1))
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    options: dict[str, Any] = {
        "balance": balance,
        "devices": ["cpu"] * stages,
        "chunks": draw.choice([1, 2, 3, 4, 8]),
        "checkpoint": draw.choice(MODES),
    }
    x.requires_grad_(draw.random() < 0.7)
    module, micro_batches = nn.Sequential(*layers), min(options["chunks"], len(x))
    if draw.random() < 0.5:
        module = convert_deferred_batch_norm(module, micro_batches)
    # A single microbatch may be returned as it is, and then is no tensor of inference.
    ways = [way for way in WAYS if micro_batches > 1 or way != "inference_mode"]
    return module, x, draw.choice(ways), options


def change(draw: random.Random, module: nn.Sequential, hooks: list[Any]) -> None:
    """Do to the layers what programs do between steps."""
    layer = draw.choice([each for each in module.modules() if each._parameters])
    name, weight = draw.choice(list(layer.named_parameters(recurse=False)))
    every, halve = list(module.parameters()), lambda _, values: (values[0] * 0.5,)
    vector = nn.utils.parameters_to_vector(every).detach() * 0.9
    changes: list[Callable[[], Any]] = [
        lambda: module.requires_grad_(draw.random() < 0.7),
        lambda: weight.requires_grad_(not weight.requires_grad),
        lambda: nn.utils.vector_to_parameters(vector, every),
        lambda: setattr(weight, "data", weight.data * 0.9),  # As an average in its place.
        lambda: setattr(layer, name, nn.Parameter(weight.detach() * 0.9)),
        lambda: module.train(draw.random() < 0.5),
        lambda: layer.train(not layer.training),
        lambda: hooks.append(layer.register_forward_pre_hook(halve)),
        lambda: hooks.pop(draw.randrange(len(hooks))).remove() if hooks else None,
    ]
    draw.choice(changes)()


def differs(seed: int, *, steps: int = 2, changes: int = 0) -> str | None:
    """How a pipe differs from the loop, or one with a timeline from one without, if they do, in so
    many steps, with at most so many ``changes`` before each, and an evaluation in float32."""
    module, x, way, options = case(seed)
    parameters = [parameter for layer in module for parameter in layer.parameters()]
    tolerance = 0.0
    if way in SCHEDULES or len(parameters) > len(set(parameters)) or changes:
        # What several paths add to a gradient comes in another order: the loss of a step has a
        # graph of its own, and each stage or microbatch a backward, which the loop has one of.
        given = x.detach().double().requires_grad_(x.requires_grad or changes > 0)
        module, x, tolerance = module.double(), given, 1e-10
    expected: list[Any] = []
    for kind in ("loop", "pipe", "pipe with a timeline"):
        draw, own, hooks = random.Random(seed), copy.deepcopy(module), list[Any]()
        found, loop, stages = list[Any](), kind == "loop", len(options["balance"])
        run: Any = Loop(cut(own, options["balance"]), options["chunks"])
        run = run if loop else Pipe(own, **options)
        with run.timeline() if kind == "pipe with a timeline" else nullcontext():
            for _ in range(steps):
                for _ in range(draw.randint(0, changes)):
                    change(draw, own, hooks)
                if changes and draw.random() < 0.4:
                    found.append(results(run, "no_grad", [x.float()], own.float(), stages))
                    own.double()
                found.append(results(run, way, [x], own, stages))
        try:
            torch.testing.assert_close(found, expected or found, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            return f"case {seed}, {way}, {kind}: {error} {options}"
        expected, tolerance = found, tolerance if loop else 0.0
    return None
