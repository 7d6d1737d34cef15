"""Layers that hand a tensor on past the layers between them."""

from __future__ import annotations

import torch
from torch import nn

from pipekernels.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes a function of what it is given, and returns what ``layer`` makes of it."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super(Stash, self).__init__()  # noqa: UP008 - the decorated class is the class itself
        self.layer = layer or nn.Identity()

    def forward(self, x: torch.Tensor):
        yield stash("skip", x.sin())
        return self.layer(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was stashed to what ``layer`` makes of what it is given."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Identity()

    def forward(self, x: torch.Tensor):
        skip = yield pop("skip")
        return self.layer(x) + skip
