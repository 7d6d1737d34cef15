"""Libraries of models tell ``tensor_parallelize`` what it cannot see in a model.

A :class:`PlanProvider` is registered once, by :func:`register_plan_provider`. It must not import
its library: where a model is of that library, the library is in ``sys.modules``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from pipekernels._torch_private import uncompiled


class ProvidedPlan(NamedTuple):
    """What a library knows of a model."""

    kinds: Mapping[str, str]
    """Kinds by patterns for module names. Some patterns may match nothing in this model."""
    divided: Mapping[str, tuple[str, ...]] = {}
    """By patterns for module names: attributes to be divided by the number of ranks."""
    heads: Mapping[str, int] = {}
    """Numbers of attention heads, which the ranks must divide, by their names."""


class PlanProvider:
    """What a library knows of its models. Every method is a no-op by default."""

    def base_of(self, model: nn.Module) -> nn.Module:
        """The model whose names plans use, inside a wrapper of the library."""
        return model

    def plan_of(self, model: nn.Module) -> ProvidedPlan | None:
        """The plan for ``"auto"``, or None if the library has none for this model.

        Raises:
            ValueError: no plan can be right for this model.
        """

    def parts_of(self, name: str, module: nn.Module, kind: str) -> list[tuple[str, nn.Module, str]]:
        """Names, modules and kinds of the layers of which ``module`` consists, if of several."""
        return []

    def prepare(self, model: nn.Module) -> None:
        """Change what must be different in a model with sharded layers."""


_providers: list[PlanProvider] = []


def register_plan_provider(provider: PlanProvider) -> None:
    """Let ``tensor_parallelize`` ask ``provider``, before those registered earlier."""
    _providers.insert(0, provider)


def base_of(model: nn.Module) -> nn.Module:
    """The model whose names plans use, which torch.compile or a library may have wrapped."""
    model = uncompiled(model)
    for provider in _providers:
        model = provider.base_of(model)
    return model


def provided_plan(model: nn.Module) -> ProvidedPlan | None:
    """The plan of the first provider that has one."""
    plans = (provider.plan_of(model) for provider in _providers)
    return next((plan for plan in plans if plan is not None), None)


def parts_of(name: str, module: nn.Module, kind: str) -> list[tuple[str, nn.Module, str]]:
    """Names, modules and kinds of the layers of which ``module`` consists, perhaps itself only."""
    for provider in _providers:
        if parts := provider.parts_of(name, module, kind):
            return parts
    return [(name, module, kind)]


def prepare(model: nn.Module) -> None:
    """Let all providers change what must be different in a model with sharded layers."""
    for provider in _providers:
        provider.prepare(model)
