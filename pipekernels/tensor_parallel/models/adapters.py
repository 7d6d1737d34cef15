"""Adapters of peft (LoRA) in a model to shard."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def adapted_base(model: nn.Module) -> nn.Module:
    """The model that peft has wrapped, whose names plans use; other models themselves."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    base: nn.Module = model.get_base_model()
    return base


def parts_of(name: str, module: Any, kind: str) -> list[tuple[str, nn.Module, str]]:
    """What ``kind`` of a linear layer with LoRA adapters means for the layers of which it consists:
    names, modules and kinds. Of other modules, themselves.

    A column-parallel layer shards the second factor like the layer itself, and has the first one
    whole; a row-parallel layer the other way round.

    Raises:
        TypeError: an adapter reads the whole weight (DoRA).
    """
    peft: Any = sys.modules.get("peft.tuners.lora.layer")
    if peft is None or not isinstance(module, peft.Linear):
        return [(name, module, kind)]
    if any(module.use_dora.values()):
        raise TypeError(
            f"{name!r} has a DoRA adapter, which needs the norms of the whole weight; merge it "
            "first (merge_and_unload), or leave this layer as it is"
        )
    factor = "lora_A" if kind.startswith("row") else "lora_B"
    factors: nn.ModuleDict = getattr(module, factor)
    return [(f"{name}.base_layer", module.base_layer, kind)] + [
        (f"{name}.{factor}.{adapter}", layer, kind) for adapter, layer in factors.items()
    ]
