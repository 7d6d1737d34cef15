"""Adapters of peft (LoRA) in a model to shard, or in one with sharded layers."""

from __future__ import annotations

import copy
import sys
import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.huggingface.pretrained import communicators, save_full_models
from pipekernels.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardedLinear,
)
from pipekernels.tensor_parallel.plan.agreement import check_equal_on_ranks
from pipekernels.tensor_parallel.plan.kinds import LayerKind
from pipekernels.tensor_parallel.plan.providers import Part, PlanProvider


def add_adapters(model: nn.Module, config: Any, adapter_name: str = "default") -> Any:
    """``peft.get_peft_model`` for a model that ``tensor_parallelize`` has sharded.

    A collective: all ranks call it, and with the same state of the random number generators, from
    which the first factors come. The result is that of sharding a model with adapters.

    Args:
        model: with sharded layers.
        config: a ``LoraConfig`` of peft.
        adapter_name: of the adapter.

    Returns:
        The ``PeftModel``.

    Raises:
        ValueError: an adapter reads the whole weight (DoRA, PiSSA and the like), or the ranks drew
            different factors. The model then has no adapters.
    """
    peft: Any = import_module("peft")
    lora: Any = import_module("peft.tuners.lora.layer")
    _check_config(config, lora)
    factors: dict[str, Tensor] = {}

    def adapter_of(layer: Any, adapter: str, config: Any, **options: Any) -> Any:
        base = layer.get_base_layer() if isinstance(layer, lora.LoraLayer) else layer
        config = copy.copy(config)
        config.fan_in_fan_out = base.is_transposed
        options["is_target_conv_1d_layer"] = base.is_transposed
        result = lora.Linear(layer, adapter, config, **options)
        for factor in ("lora_A", "lora_B"):
            factors[f"{base.name}.{factor}.{adapter}"] = getattr(result, factor)[adapter].weight
        sharded = "lora_A" if isinstance(base, RowParallelLinear) else "lora_B"
        parts: Any = getattr(result, sharded)
        parts[adapter] = _sharded_like(base, parts[adapter], f"{base.name}.{sharded}.{adapter}")
        return result

    config = copy.copy(config)
    config._register_custom_module(
        {ColumnParallelLinear: adapter_of, RowParallelLinear: adapter_of}
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type .*ParallelLinear")
        adapted = peft.get_peft_model(model, config, adapter_name=adapter_name)
    try:
        for comm in communicators(model):
            check_equal_on_ranks(factors, comm)
    except ValueError:
        adapted.unload()
        raise
    save_full_models(adapted)
    return adapted


def _check_config(config: Any, lora: Any) -> None:
    """Raise ValueError if adapters of ``config`` need whole weights."""
    plain = copy.copy(config)
    plain.init_lora_weights = False
    with torch.device("meta"):  # Draws no random numbers.
        trial = lora.Linear(nn.Linear(1, 1), "trial", plain, r=1)
    if config.init_lora_weights not in (True, False, "gaussian") or trial.lora_variant:
        raise ValueError(
            f"adapters with init_lora_weights={config.init_lora_weights!r} and "
            f"use_dora={config.use_dora} read whole weights, of which a rank has a shard; use "
            "plain LoRA (init_lora_weights True, False or 'gaussian'), or add them before "
            "tensor_parallelize"
        )


def _sharded_like(base: Any, factor: nn.Linear, name: str) -> nn.Module:
    """The factor of an adapter that is sharded as its layer ``base`` is."""
    if isinstance(base, RowParallelLinear):
        options = {"input_is_parallel": base.input_is_parallel, "reduce": base.reduce}
    else:
        options = {"gather_output": base.gather_output, "copies": base.copies}
        options["blocks"] = base.blocks or None
    options["invariant"] = base.invariant
    result: ShardedLinear = type(base).from_linear(factor, base.comm, **options)
    result.name = name
    return result


class Peft(PlanProvider):
    """Models with adapters of peft."""

    def base_of(self, model: nn.Module) -> nn.Module:
        peft: Any = sys.modules.get("peft")
        if peft is None or not isinstance(model, peft.PeftModel):
            return model
        for name, config in model.peft_config.items():
            if config.peft_type == peft.PeftType.PREFIX_TUNING:
                raise ValueError(
                    f"the adapter {name!r} is of prefix tuning, which hands keys and values of all "
                    "heads to every layer, and a rank has a part of them; use LoRA, or prompt "
                    "tuning"
                )
        base: nn.Module = model.get_base_model()
        return base

    def parts_of(self, name: str, module: Any, kind: LayerKind) -> list[Part]:
        """A linear layer with LoRA adapters consists of the layer and the factors that are sharded
        with it: a column-parallel layer's second ones, a row-parallel layer's first ones."""
        lora: Any = sys.modules.get("peft.tuners.lora.layer")
        if lora is None or not isinstance(module, lora.Linear):
            return []
        if any(module.use_dora.values()):
            raise TypeError(
                f"{name!r} has a DoRA adapter, which needs the norms of the whole weight; merge it "
                "first (merge_and_unload), or leave this layer as it is"
            )
        factor = "lora_A" if kind.cuts_input else "lora_B"
        adapters: nn.ModuleDict = getattr(module, factor)
        return [(f"{name}.base_layer", module.base_layer, kind)] + [
            (f"{name}.{factor}.{adapter}", layer, kind) for adapter, layer in adapters.items()
        ]
