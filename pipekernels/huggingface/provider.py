"""What Hugging Face's libraries know of their models, for ``tensor_parallelize``."""

from __future__ import annotations

from torch import nn

from pipekernels.huggingface import adapters, plans
from pipekernels.huggingface.generation import compare_ranks_in_generate, warn_of_attentions
from pipekernels.huggingface.pretrained import save_full_models
from pipekernels.tensor_parallel.plan.providers import PlanProvider, ProvidedPlan, base_of
from pipekernels.tensor_parallel.sharded import sharded_layers


class HuggingFace(PlanProvider):
    """Models of transformers, perhaps with adapters of peft."""

    def base_of(self, model: nn.Module) -> nn.Module:
        return adapters.base_of(model)

    def plan_of(self, model: nn.Module) -> ProvidedPlan | None:
        return plans.plan_of(model)

    def parts_of(self, name: str, module: nn.Module, kind: str) -> list[tuple[str, nn.Module, str]]:
        return adapters.parts_of(name, module, kind)

    def prepare(self, model: nn.Module) -> None:
        save_full_models(model)
        compare_ranks_in_generate(model)
        if sharded_layers(model):
            warn_of_attentions(base_of(model))
