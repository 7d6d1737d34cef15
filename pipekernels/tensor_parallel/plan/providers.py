"""Lets model libraries tell ``tensor_parallelize`` what it cannot see in a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from torch import nn

from pipekernels._torch_private import uncompiled
from pipekernels.tensor_parallel.functional import Heads
from pipekernels.tensor_parallel.plan.kinds import LayerKind

Part: TypeAlias = tuple[str, nn.Module, LayerKind]  # Name, layer and kind.


class ProvidedPlan(NamedTuple):
    """What a library knows about a model."""

    words: Mapping[str, str]
    """Kinds by patterns for module names. Some patterns may match nothing in this model."""
    divided: Mapping[str, tuple[str, ...]] = {}
    """By patterns for module names: attributes of which a rank has its share."""
    heads: Mapping[str, Heads] = {}
    """By names of modules that the plan names: of which heads their features are."""
    towers: Mapping[str, ProvidedPlan] = {}
    """By names of models inside the model, of which ``words`` names nothing: their own plans."""

    def with_towers(self, world_size: int) -> ProvidedPlan:
        """The plan with those of its towers that have enough heads for ``world_size`` ranks."""
        words, divided, heads = dict(self.words), dict(self.divided), dict(self.heads)
        for tower, plan in self.towers.items():
            if all(count >= world_size for count, _ in plan.heads.values()):
                words |= {f"{tower}.{pattern}": word for pattern, word in plan.words.items()}
                divided |= {f"{tower}.{pattern}": keys for pattern, keys in plan.divided.items()}
                heads |= {f"{tower}.{name}": own for name, own in plan.heads.items()}
        return ProvidedPlan(words, divided, heads)


class PlanProvider:
    """What a library knows about its models. By default, methods do nothing. A provider must not
    import the library: if a model is from it, it is in ``sys.modules``."""

    def base_of(self, model: nn.Module) -> nn.Module:
        """The model whose names plans use, inside a wrapper of the library."""
        return model

    def plan_of(self, model: nn.Module) -> ProvidedPlan | None:
        """The plan for ``"auto"``, or None if the library has none for this model.

        Raises:
            ValueError: no plan can be right for this model.
        """

    def parts_of(self, name: str, module: nn.Module, kind: LayerKind) -> list[Part]:
        """The layers of ``module``, if it wraps some. TypeError if they must stay whole."""
        return []

    def prepare(self, model: nn.Module) -> None:
        """Change what a model with sharded layers needs changed."""


PROVIDERS: list[PlanProvider] = []
"""In the order in which they are asked."""


def register_plan_provider(provider: PlanProvider) -> None:
    """Let ``tensor_parallelize`` ask ``provider``, before those registered earlier."""
    PROVIDERS.insert(0, provider)


def parts_of(name: str, module: nn.Module, kind: LayerKind) -> list[Part]:
    """The layers to shard in ``module``, perhaps only itself. TypeError if they must stay whole."""
    parts = (provider.parts_of(name, module, kind) for provider in PROVIDERS)
    return next(filter(None, parts), [(name, module, kind)])


def base_of(model: nn.Module) -> nn.Module:
    """The model whose names plans use, which torch.compile or a library may have wrapped."""
    model = uncompiled(model)
    for provider in PROVIDERS:
        model = provider.base_of(model)
    return model
