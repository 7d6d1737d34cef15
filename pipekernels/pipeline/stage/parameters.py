"""Private gradient accumulators for the parameters of a stage.

While a stage runs, each of its trainable parameters is replaced in its module by an *alias*: a leaf
that shares the parameter's storage and version counter but has its own ``.grad`` and hooks. The
stage's backwards accumulate there, in autograd's own C++ code, and the pipe's single autograd node
hands the sums to the real parameters. So ``torch.autograd.grad`` leaves ``.grad`` alone, and a hook
on a parameter fires once per backward, not once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipekernels._torch_private import are_parametrizations_cached
from pipekernels.device.restoring import restoring


def _make_alias(
    parameter: nn.Parameter, detached: torch.Tensor, *, trainable: bool = True
) -> nn.Parameter:
    # A subclass of Parameter keeps its type.
    plain = type(parameter) is nn.Parameter
    made: Any = nn.Parameter(detached, trainable) if plain else detached.requires_grad_(trainable)
    alias: nn.Parameter = made
    alias.__dict__ = parameter.__dict__  # What the user's code has noted there, now and later.
    return alias


def identity(parameter: nn.Parameter) -> int:
    """The same for a parameter and all its aliases."""
    return id(vars(parameter))  # Theirs is the parameter's own.


def _is_current(alias: nn.Parameter, parameter: nn.Parameter) -> bool:
    """False once the parameter has other memory or another layout, as after
    ``module.to(dtype)``."""
    return (
        alias.data_ptr() == parameter.data_ptr()
        and alias.dtype == parameter.dtype
        and alias.shape == parameter.shape
        and alias.stride() == parameter.stride()
    )


class StageParameters:
    """The trainable parameters of one stage and their aliases, and the frozen ones, as they are
    when this object is made.

    Args:
        module: the stage.
        previous: what an earlier call found; aliases that still fit are taken over.
        own_versions: whether aliases count for themselves how often they are changed, so that a
            graph may be gone through backwards after their parameters were.
    """

    def __init__(
        self,
        module: nn.Module,
        previous: StageParameters | None = None,
        *,
        own_versions: bool = False,
    ) -> None:
        known = previous.pairs if previous is not None else {}
        self._own_versions = own_versions
        # The layers, and what says how they may run: classes, also of parameters, modes, hooks.
        self._makeup: list[object] = []
        # id of the parameter -> (parameter, alias)
        self.pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        # where each lives: (its layer's parameter dict, its name there, parameter, alias)
        self._slots: list[
            tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]
        ] = []
        # as in _slots; without aliases
        self.frozen: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        # Walked by hand, every mini-batch: module.modules() takes as long as a small layer's
        # forward.
        stack: list[nn.Module | None] = [module]
        while stack:
            layer = stack.pop()
            if layer is None:
                continue
            self._makeup += layer, type(layer), layer.training, bool(layer._forward_pre_hooks)
            stack.extend(reversed(layer._modules.values()))
            for name, parameter in layer._parameters.items():
                self._makeup.append(type(parameter))
                if parameter is None:
                    continue
                if not parameter.requires_grad:
                    self.frozen.append((layer._parameters, name, parameter))
                    continue
                key = id(parameter)
                pair = self.pairs.get(key) or known.get(key)
                if pair is None or not _is_current(pair[1], parameter):
                    detached = parameter.data if own_versions else parameter.detach()
                    pair = (parameter, _make_alias(parameter, detached))
                self.pairs[key] = pair
                self._slots.append((layer._parameters, name, *pair))

    def is_made_up_as(self, other: StageParameters) -> bool:
        """Whether the same layers are there, and nothing about them says that they are to be looked
        at again."""
        return self._makeup == other._makeup

    def all(self) -> list[nn.Parameter]:
        """The aliases, and what is frozen."""
        aliases = [alias for _, alias in self.pairs.values()]
        return aliases + [parameter for _, _, parameter in self.frozen]

    def found(self) -> list[tuple[nn.Parameter | None, int]]:
        """What is in the aliases' places, and where the aliases' memory is."""
        return [
            # Those of a scripted layer have no get().
            (owner[name] if name in owner else None, alias.data_ptr())  # noqa: SIM401
            for owner, name, _, alias in self._slots
        ]

    def moved(self) -> bool:
        """Whether an alias has got other memory than its parameter."""
        return any(alias.data_ptr() != p.data_ptr() for p, alias in self.pairs.values())

    def install(self) -> None:
        for owner, name, _, alias in self._slots:
            owner[name] = alias

    def remove(self, found: Sequence[tuple[nn.Parameter | None, int]]) -> None:
        """Put back what was :meth:`found`."""
        for (owner, name, parameter, alias), (before, memory) in zip(
            self._slots, found, strict=True
        ):
            owner[name] = before
            # A layer has given its parameter other memory; but that of a graph is the graph's.
            if alias.data_ptr() != memory and not self._own_versions:
                parameter.data = alias.data


@contextmanager
def installed(stages: Sequence[StageParameters]) -> Iterator[None]:
    """Have the aliases of all ``stages`` in place while the body runs. What was there comes back
    afterwards: the parameters, aliases of another run, or what the user has put there since.

    Raises:
        RuntimeError: in ``torch.nn.utils.parametrize.cached()``, whose values are of one graph.
    """
    if are_parametrizations_cached():
        raise RuntimeError(
            "torch.nn.utils.parametrize.cached() would give every micro-batch the graph of the "
            "first; leave it away around forwards and backwards of a pipe, or evaluate under "
            "no_grad()"
        )
    found = [parameters.found() for parameters in stages]

    def remove() -> None:
        for parameters, before in zip(stages, found, strict=True):
            parameters.remove(before)

    # Aliases that stayed would be other parameters than those of the optimizer.
    with restoring(remove):
        for parameters in stages:
            parameters.install()
        yield


@contextmanager
def frozen_again(stages: Sequence[StageParameters]) -> Iterator[None]:
    """Have what was frozen when ``stages`` were made in its place while the body runs, and frozen:
    a recomputation goes by its forward, which may have been inside
    ``torch.func.functional_call``."""
    changed = [
        (owner, name, parameter, owner[name])
        for stage in stages
        for owner, name, parameter in stage.frozen
        if name in owner and (owner[name] is not parameter or parameter.requires_grad)
    ]

    def put_back() -> None:
        for owner, name, _, now in changed:
            owner[name] = now

    with restoring(put_back):
        for owner, name, parameter, _ in changed:
            trains = parameter.requires_grad
            owner[name] = (
                _make_alias(parameter, parameter.detach(), trainable=False) if trains else parameter
            )
        yield


def unique(stages: Sequence[StageParameters]) -> list[nn.Parameter]:
    """The real parameters of all ``stages``, each once."""
    return list({key: pair[0] for stage in stages for key, pair in stage.pairs.items()}.values())


def accumulated(
    parameters: Sequence[nn.Parameter], stages: Sequence[StageParameters]
) -> list[torch.Tensor | None]:
    """Take what the aliases have accumulated: one gradient per parameter, summed over stages in
    their order."""
    total: dict[int, torch.Tensor] = {}
    for stage in stages:
        for key, (_, alias) in stage.pairs.items():
            grad, alias.grad = alias.grad, None
            if grad is not None:
                total[key] = add_gradients(total[key], grad) if key in total else grad
    return [total.get(id(parameter)) for parameter in parameters]


def add_gradients(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Their sum, for sparse ones too."""
    # Sparse tensors can be added to dense ones, not the other way round.
    return other.add(one) if one.is_sparse else one.add(other)
