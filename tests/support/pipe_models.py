"""Small models for pipes: all kinds of values that pass between layers, and of state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipekernels import NoChunk
from pipekernels.batchnorm import convert_deferred_batch_norm
from pipekernels.skip import Namespace, pop, skippable, stash
from support.function_layer import FunctionLayer
from support.loops import loss_of
from support.skip_layers import Pop, Stash

ROWS, CHUNKS, WIDTH = 7, 3, 6  # Microbatches of 3, 2 and 2 rows.


@dataclass
class Model:
    layers: Callable[[], list[nn.Module]]
    balance: list[int]
    args: Callable[[], tuple[Any, ...]] = lambda: (randn(ROWS, WIDTH).requires_grad_(),)
    # Whether the whole batch at once has the same results.
    is_by_row: bool = True
    # Whether a gradient is a sum of several terms per microbatch, whose order is not the loop's.
    has_sums: bool = False
    writes_to_inputs: bool = False
    autocast: bool = False
    loss: Callable[[Any], Tensor] = loss_of
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, dtype: torch.dtype) -> nn.Sequential:
        torch.manual_seed(0)
        layers = self.layers()
        for tensor in [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        return nn.Sequential(*layers)

    def inputs(self, dtype: torch.dtype) -> list[Any]:
        torch.manual_seed(1)
        return [_cast(arg, dtype) for arg in self.args()]


def _cast(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, NoChunk):
        return NoChunk(arg.tensor.to(dtype))
    if isinstance(arg, Tensor) and arg.is_floating_point():
        return arg.detach().to(dtype).requires_grad_(arg.requires_grad)
    return arg


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mlp() -> list[nn.Module]:
    return [linear(), nn.Tanh(), nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear()]


def frozen() -> list[nn.Module]:
    """One whole stage, and a weight of another one."""
    layers = mlp()
    layers[3].requires_grad_(False)
    layers[5].weight.requires_grad_(False)
    return layers


class Inner(NamedTuple):
    hidden: Tensor
    indices: Tensor


class Encode(nn.Linear):
    """Takes several arguments and returns nested containers."""

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Any:
        inner = Inner(super().forward(x * mask + bias), torch.arange(len(x)))
        return {"inner": inner, "rows": [len(x), None]}


class Decode(nn.Linear):
    def forward(self, value: Any) -> Any:
        y = super().forward(value["inner"].hidden)
        # All microbatches' indices together are not those of the whole batch.
        return {"y": y, "rest": (value["inner"].indices >= 0, y.square().mean(), value["rows"])}


@skippable(stash=["a"])
class Start(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x.sin())
        return x


@skippable(stash=["b"], pop=["a"])
class Exchange(nn.Module):
    """Pops one skip and stashes another."""

    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        yield stash("b", x * a)
        return x + a


@skippable(pop=["b"])
class End(nn.Module):
    def forward(self, x: Tensor) -> Any:
        b = yield pop("b")
        return x - b


def nested_skips() -> list[nn.Module]:
    one, two = Namespace(), Namespace()
    return [
        Stash(linear()).isolate(one), linear(), Stash(linear()).isolate(two), nn.Tanh(),
        Pop(linear()).isolate(two), Pop(linear()).isolate(one), linear(),
    ]  # fmt: skip


def shared() -> list[nn.Module]:
    """A layer in two stages, and a weight of two layers."""
    twice, a, b = linear(), linear(), linear()
    b.weight = a.weight
    return [twice, a, nn.Tanh(), b, twice]


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh())


class Noisy(nn.MultiheadAttention):
    """All kinds of dropout that are visible from Python."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x.unsqueeze(0), 0.4, self.training) + 0.1 * torch.randn_like(x)
        x = super().forward(x, x, x, need_weights=False)[0]
        q = x.view(-1, 1, 3, 2)
        x = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).reshape(-1, WIDTH)
        return x * torch.empty_like(x).bernoulli_(0.8)


def dropout() -> list[nn.Module]:
    return [Noisy(WIDTH, 2, 0.3), nn.Dropout(0.5), Noisy(WIDTH, 2, 0.3), nn.Dropout(0.3)]


def noisy_loss(output: Tensor) -> Tensor:
    return loss_of(F.dropout(output, 0.4)) * torch.rand(())


def batch_norm() -> list[nn.Module]:
    return [linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH, momentum=None)]


def in_place() -> list[nn.Module]:
    """The first layer writes to the input, a stage returns a view, and the next writes to it."""
    writes = FunctionLayer(lambda x: x.sub_(0.5).mul_(x.detach() > 0))
    return [
        nn.ReLU(inplace=True), linear(), nn.Flatten(0), nn.Unflatten(0, (-1, WIDTH)), writes,
        nn.Tanh(),
    ]  # fmt: skip


class Lends(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight


def lends() -> list[nn.Module]:
    """Stages that return their parameter, and their input."""
    borrows = FunctionLayer(lambda pair: pair[0] @ pair[1])
    return [linear(), Lends(WIDTH, WIDTH), borrows, FunctionLayer(lambda x: x)]


class Counting(nn.Linear):
    """Multiplies by a buffer that counts calls, and that is updated in place or replaced."""

    count: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.in_place = in_place
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh() * self.count.clone()
        if self.in_place:
            self.count.add_(1)
        else:
            self.count = self.count + 1
        return y


class Sharing(nn.Linear):
    """Multiplies by a buffer that another layer changes."""

    def __init__(self, other: Counting) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", other.count)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.count.clone()


def shared_buffer() -> list[nn.Module]:
    counting = Counting(True)
    return [counting, Sharing(counting), linear()]


def spectral_norm() -> list[nn.Module]:
    return [nn.utils.parametrizations.spectral_norm(linear()) for _ in range(3)]


EMBEDDED = lambda: (torch.tensor([0, 1, 1, 3, 4, 2, 1]),)
MODELS: dict[str, Model] = {
    "tensors": Model(mlp, [2, 1, 2, 1]),
    "another dimension": Model(
        mlp, [2, 4], lambda: (randn(2, ROWS, 3, WIDTH).requires_grad_(),), options={"batch_dim": 1}
    ),
    "frozen": Model(frozen, [2, 1, 1, 2]),
    "nested": Model(
        lambda: [Encode(WIDTH, WIDTH), Decode(WIDTH, 3)],
        [1, 1],
        lambda: (
            randn(ROWS, WIDTH).requires_grad_(),
            NoChunk(torch.rand(WIDTH)),
            randn(ROWS, 1).requires_grad_(),
        ),
    ),
    "nested skips": Model(nested_skips, [2, 1, 2, 2]),
    "crossing skips": Model(lambda: [Start(), linear(), Exchange(), linear(), End()], [2, 1, 1, 1]),
    "shared": Model(shared, [2, 3], has_sums=True),
    "used twice": Model(lambda: [linear(), Twice(WIDTH, WIDTH), linear()], [1, 2], has_sums=True),
    "dropout": Model(dropout, [1, 1, 1, 1], is_by_row=False, loss=noisy_loss),
    "batch norm": Model(batch_norm, [1, 1, 1, 1], is_by_row=False),
    "deferred batch norm": Model(
        lambda: list(convert_deferred_batch_norm(nn.Sequential(*batch_norm()), CHUNKS)),
        [1, 1, 1, 1],
        is_by_row=False,
    ),
    "autocast": Model(mlp, [3, 1, 1, 1], is_by_row=False, autocast=True),
    "in place": Model(in_place, [2, 1, 2, 1], writes_to_inputs=True),
    "in place, on one of two inputs": Model(
        lambda: [
            FunctionLayer(lambda x, y: (x, y[:])),
            FunctionLayer(lambda pair: pair[0].mul_(2) + pair[1]),
            linear(),
        ],
        [1, 1, 1],
        lambda: (randn(ROWS, WIDTH), randn(ROWS, WIDTH)),
        writes_to_inputs=True,
    ),
    "lent": Model(lends, [1, 1, 1, 1], has_sums=True),
    "embedding": Model(lambda: [nn.Embedding(5, WIDTH), linear()], [1, 1], EMBEDDED),
    "spectral norm": Model(spectral_norm, [2, 1], is_by_row=False, has_sums=True),
    "counts in place": Model(lambda: [Counting(True) for _ in range(3)], [2, 1], is_by_row=False),
    "counts by replacing": Model(
        lambda: [Counting(False) for _ in range(3)], [2, 1], is_by_row=False
    ),
    "a shared buffer": Model(shared_buffer, [2, 1], is_by_row=False),
}
