"""Attention with linear biases (ALiBi), which depend on a head's number among all heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.changes import add_forward_pre_hook


def split_alibi(module: nn.Module, comm: Communicator) -> None:
    """Let ``module`` take of its argument ``alibi``, ``[batch * heads, ...]``, the heads of this
    rank; its attribute ``num_heads`` is their number."""
    add_forward_pre_hook(module, _SplitAlibi(comm), with_kwargs=True)


class _SplitAlibi:
    """Forward pre-hook."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        heads, rank = module.num_heads, self._comm.rank
        every = kwargs["alibi"].unflatten(0, (-1, heads * self._comm.world_size))
        own = every[:, rank * heads : (rank + 1) * heads].flatten(0, 1)
        return args, kwargs | {"alibi": own}

    def __deepcopy__(self, memo: dict[int, Any]) -> _SplitAlibi:
        return self  # A copied model shares the communicator.
