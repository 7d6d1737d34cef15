"""Layers with a skip connection between them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipekernels.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes ``value(x)`` and returns ``layer(x)``."""

    def __init__(
        self, layer: nn.Module | None = None, value: Callable[..., Any] = torch.sin
    ) -> None:
        super(Stash, self).__init__()  # noqa: UP008 - the decorated class is the class itself
        self.layer, self.value = layer or nn.Identity(), value

    def forward(self, x: torch.Tensor) -> Any:
        yield stash("skip", self.value(x))
        return self.layer(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Returns ``join(layer(x), skip)``."""

    def __init__(
        self, layer: nn.Module | None = None, join: Callable[..., Any] = torch.add
    ) -> None:
        super().__init__()
        self.layer, self.join = layer or nn.Identity(), join

    def forward(self, x: torch.Tensor) -> Any:
        skip = yield pop("skip")
        return self.join(self.layer(x), skip)
