"""torch's own layers, such as ``nn.TransformerEncoder``."""

from __future__ import annotations

from torch import nn

from pipekernels.tensor_parallel.changes import set_attribute
from pipekernels.tensor_parallel.plan.providers import PlanProvider, ProvidedPlan
from pipekernels.tensor_parallel.sharded import sharded_layers

_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class TorchLayers(PlanProvider):
    """A plan for torch's own layers; the other layers of such a model stay whole."""

    def plan_of(self, model: nn.Module) -> ProvidedPlan | None:
        plan = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                plan[name] = "attention"
            elif isinstance(module, _LAYERS):
                prefix = f"{name}." if name else ""
                plan |= {f"{prefix}linear1": "column", f"{prefix}linear2": "row"}
        return ProvidedPlan(plan) if plan else None

    def prepare(self, model: nn.Module) -> None:
        """Disable torch's fused encoder kernel, which would read shards as full weights."""
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer) and sharded_layers(module):
                # The fused kernel needs 1 (ReLU) or 2 (GELU).
                set_attribute(module, "activation_relu_or_gelu", 0)
            if isinstance(module, nn.TransformerEncoder) and sharded_layers(module):
                # Only the fused kernel takes nested tensors.
                set_attribute(module, "use_nested_tensor", False)
