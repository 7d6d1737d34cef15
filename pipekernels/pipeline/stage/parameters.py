"""Private gradient accumulators for the parameters of a stage.

While a stage runs, each of its trainable parameters is replaced in its module by an *alias*: a leaf
that shares the parameter's storage and version counter but has its own ``.grad`` and hooks. The
stage's backwards accumulate there, in autograd's own C++ code, and the pipe's single autograd node
returns the sums as the gradients of the parameters. So ``torch.autograd.grad`` does not change
``.grad``, and a hook on a parameter is called once per backward, not once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import starmap
from typing import Any

import torch
from torch import nn

from pipekernels._torch_private import are_parametrizations_cached

Owner = dict[str, nn.Parameter | None]
"""The ``_parameters`` of a layer."""


def _make_alias(parameter: nn.Parameter, *, trainable: bool = True) -> nn.Parameter:
    detached = parameter.detach()  # Of the parameter's class, if that is a subclass.
    plain = type(parameter) is nn.Parameter
    alias: Any = nn.Parameter(detached, trainable) if plain else detached.requires_grad_(trainable)
    alias.__dict__ = parameter.__dict__  # Shared: attributes that the user's code sets.
    return alias  # type: ignore[no-any-return]


def identity(parameter: nn.Parameter) -> int:
    """A number that a parameter has in common with all its aliases."""
    return id(vars(parameter))  # Aliases share the parameter's __dict__.


def _is_current(parameter: nn.Parameter, alias: nn.Parameter) -> bool:
    """Whether the parameter still has the alias's memory and layout; ``module.to(dtype)`` changes
    them."""
    return (
        parameter.requires_grad
        and alias.data_ptr() == parameter.data_ptr()
        and alias.dtype == parameter.dtype
        and alias.shape == parameter.shape
        and alias.stride() == parameter.stride()
    )


class StageParameters:
    """The trainable parameters of a stage with their aliases, and its frozen parameters, at the
    time this object is made. Aliases of ``previous`` that are still current are reused."""

    def __init__(self, module: nn.Module, previous: StageParameters | None = None) -> None:
        known = previous.pairs if previous is not None else {}
        # Layers with their classes, modes, pre-hooks, children and parameters (ids, classes).
        self._layers: list[tuple[nn.Module, type, bool, bool, list[Any], list[int], list[type]]]
        self._layers = []
        # id of the parameter -> (parameter, alias)
        self.pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        # (parameter dict of a layer, name in it, parameter, alias)
        self.entries: list[tuple[Owner, str, nn.Parameter, nn.Parameter]] = []
        # As entries, without aliases.
        self.frozen: list[tuple[Owner, str, nn.Parameter]] = []
        stack: list[nn.Module | None] = [module]
        while stack:
            layer = stack.pop()
            if layer is None:
                continue
            children, own = list(layer._modules.values()), layer._parameters
            hooked, ids = bool(layer._forward_pre_hooks), [*map(id, own.values())]
            types = [*map(type, own.values())]
            self._layers.append((layer, type(layer), layer.training, hooked, children, ids, types))
            stack.extend(reversed(children))
            for name, parameter in own.items():
                if parameter is None:
                    continue
                if not parameter.requires_grad:
                    self.frozen.append((own, name, parameter))
                    continue
                key = id(parameter)
                pair = self.pairs.get(key) or known.get(key)
                if pair is None or not _is_current(*pair):
                    pair = (parameter, _make_alias(parameter))
                self.pairs[key] = pair
                self.entries.append((own, name, *pair))

    def is_current(self) -> bool:
        """Whether an object made now would be the same. Without calls, as every mini-batch asks."""
        for layer, kind, training, hooked, children, ids, _ in self._layers:
            if (
                layer.training is not training
                or type(layer) is not kind
                or bool(layer._forward_pre_hooks) is not hooked
                or list(layer._modules.values()) != children
                or [*map(id, layer._parameters.values())] != ids
            ):
                return False
        if any(parameter.requires_grad for _, _, parameter in self.frozen):
            return False
        return all(starmap(_is_current, self.pairs.values()))

    def has_same_layers(self, other: StageParameters) -> bool:
        """Whether both have the same layers, with the same classes, modes, pre-hooks and classes of
        parameters."""
        return [(*each[:5], each[6]) for each in self._layers] == [
            (*each[:5], each[6]) for each in other._layers
        ]

    def all(self) -> list[nn.Parameter]:
        """The aliases and the frozen parameters."""
        aliases = [alias for _, alias in self.pairs.values()]
        return aliases + [parameter for _, _, parameter in self.frozen]


@contextmanager
def installed(stages: Sequence[StageParameters]) -> Iterator[None]:
    """Put the aliases of all ``stages`` into the layers in the body. Afterwards the layers get back
    what they had: parameters, aliases of another run, or what the user has put there since.
    RuntimeError in ``parametrize.cached()``, whose values belong to one graph."""
    if are_parametrizations_cached():
        raise RuntimeError(
            "torch.nn.utils.parametrize.cached() would give every micro-batch the graph of the "
            "first; leave it away around forwards and backwards of a pipe, or evaluate under "
            "no_grad()"
        )
    entries = [entry for parameters in stages for entry in parameters.entries]
    before = [owner[name] for owner, name, _, _ in entries]
    addresses = [alias.data_ptr() for _, _, _, alias in entries]
    try:
        for owner, name, _, alias in entries:
            owner[name] = alias
        yield
    finally:
        for i, (owner, name, parameter, alias) in enumerate(entries):
            owner[name] = before[i]
            # Give parameters the memory that layers have assigned to them, here to the aliases.
            if alias.data_ptr() != addresses[i]:
                parameter.data = alias.data


@contextmanager
def replaced(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set ``owner[name] = value`` in the body, for each (owner, name, value) of ``entries``."""
    entries = list(entries)
    before = [owner[name] for owner, name, _ in entries]
    try:
        for owner, name, value in entries:
            owner[name] = value
        yield
    finally:
        for (owner, name, _), value in zip(entries, before, strict=True):
            owner[name] = value


def freeze_as_in_forward(stages: Sequence[StageParameters]) -> AbstractContextManager[None]:
    """In the body, a recomputation, put back and freeze the parameters that were frozen when
    ``stages`` were made: the forward may have run inside ``torch.func.functional_call``."""
    return replaced(
        (owner, name, _make_alias(p, trainable=False) if p.requires_grad else p)
        for stage in stages
        for owner, name, p in stage.frozen
        if name in owner and (owner[name] is not p or p.requires_grad)
    )


def unique(stages: Sequence[StageParameters]) -> list[nn.Parameter]:
    """The parameters (not aliases) of all ``stages``, each once."""
    return list({key: pair[0] for stage in stages for key, pair in stage.pairs.items()}.values())


def drop_accumulated(stages: Sequence[StageParameters]) -> bool:
    """Drop what backwards that are none of a stage's have accumulated; returns whether there was
    anything."""
    aliases = [alias for stage in stages for _, alias in stage.pairs.values()]
    found = any(alias.grad is not None for alias in aliases)
    if found:
        for alias in aliases:
            alias.grad = None
    return found


def accumulated(
    parameters: Sequence[nn.Parameter], stages: Sequence[StageParameters]
) -> list[torch.Tensor | None]:
    """Take the gradients that the aliases have accumulated: one per parameter, summed over stages
    in their order."""
    total: dict[int, torch.Tensor] = {}
    for stage in stages:
        for key, (_, alias) in stage.pairs.items():
            grad, alias.grad = alias.grad, None
            if grad is not None:
                total[key] = add_gradients(total[key], grad) if key in total else grad
    return [total.get(id(parameter)) for parameter in parameters]


def add_gradients(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, each sparse or dense."""
    # torch can add a sparse tensor to a dense one, not the other way round.
    return other.add(one) if one.is_sparse else one.add(other)
