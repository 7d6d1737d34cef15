"""Layers with a skip connection between them."""

from __future__ import annotations

import torch
from torch import nn

from pipekernels.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes ``x.sin()`` and returns ``layer(x)``."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super(Stash, self).__init__()  # noqa: UP008 - the decorated class is the class itself
        self.layer = layer or nn.Identity()

    def forward(self, x: torch.Tensor):
        yield stash("skip", x.sin())
        return self.layer(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Returns ``layer(x)`` plus the stashed tensor."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Identity()

    def forward(self, x: torch.Tensor):
        skip = yield pop("skip")
        return self.layer(x) + skip
