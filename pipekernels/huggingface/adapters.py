"""Adapters of peft (LoRA), before and after a model is sharded."""

from __future__ import annotations

import copy
import sys
import warnings
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import nn

from pipekernels._arguments import check_kind
from pipekernels.huggingface.pretrained import save_pretrained
from pipekernels.tensor_parallel.full_layer import set_attribute
from pipekernels.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardedLinear,
)
from pipekernels.tensor_parallel.plan.kinds import LayerKind
from pipekernels.tensor_parallel.plan.sharding_plan import PlanProvider
from pipekernels.tensor_parallel.sharded import sharded_layers


def add_adapters(model: nn.Module, config: Any, adapter_name: str = "default") -> Any:
    """``peft.get_peft_model`` for a model that ``tensor_parallelize`` has sharded.

    A collective: all ranks get the initial factors that rank 0 draws. The result is the same
    ``PeftModel`` as from sharding a model that has adapters.

    Args:
        model: a model with sharded layers.
        config: a ``LoraConfig`` of peft.
        adapter_name: the name of the adapter.

    Raises:
        ValueError: an adapter reads the whole weight (DoRA, PiSSA and the like). The model is then
            unchanged.
    """
    peft: Any = import_module("peft")
    lora: Any = import_module("peft.tuners.lora.layer")
    _check_config(config, lora)

    def adapter_of(layer: Any, adapter: str, config: Any, **options: Any) -> Any:
        base = layer.get_base_layer() if isinstance(layer, lora.LoraLayer) else layer
        if base.integers:
            raise ValueError(
                f"{base.name!r} has weights of integers, which have no gradients; add adapters "
                "before quantize_weights()"
            )
        config = copy.copy(config)
        config.fan_in_fan_out = base.is_transposed
        options["is_target_conv_1d_layer"] = base.is_transposed
        result = lora.Linear(layer, adapter, config, **options)
        _shard_adapter(result, adapter)
        return result

    # peft asks this before it looks at its own classes; the caller's config stays as it is.
    config = copy.copy(config)
    config._register_custom_module(
        {ColumnParallelLinear: adapter_of, RowParallelLinear: adapter_of}
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type .*ParallelLinear")
        adapted = peft.get_peft_model(model, config, adapter_name=adapter_name)
    Peft().prepare(adapted)
    return adapted


def _check_config(config: Any, lora: Any) -> None:
    """Raise TypeError if ``config`` is not one of LoRA, ValueError if its adapters need whole
    weights."""
    check_kind("config", config, sys.modules["peft"].LoraConfig, "a peft.LoraConfig")
    plain = copy.copy(config)
    plain.init_lora_weights = False
    with torch.device("meta"):  # Draws no random numbers.
        trial = lora.Linear(nn.Linear(1, 1), "trial", plain, r=1)
    whole = [type(variant).__name__ for variant in trial.lora_variant.values()]
    if config.init_lora_weights not in (True, False, "gaussian"):
        whole.append(f"init_lora_weights={config.init_lora_weights!r}")
    if config.trainable_token_indices:
        whole.append("trainable_token_indices")
    if whole:
        raise ValueError(
            f"adapters with {' and '.join(whole)} read whole weights, but a rank has only a shard; "
            "use plain LoRA (init_lora_weights True, False or 'gaussian'), or add them before "
            "tensor_parallelize"
        )


def _update_layer(self: Any, adapter_name: str, *args: Any, config: Any, **kwargs: Any) -> None:
    _check_config(config, sys.modules["peft.tuners.lora.layer"])
    type(self).update_layer(self, adapter_name, *args, config=config, **kwargs)
    _shard_adapter(self, adapter_name)


def _add_weighted(
    self: Any,
    adapters: Any,
    weights: Any,
    adapter_name: str,
    combination_type: str = "svd",
    **kwargs: Any,
) -> None:
    if combination_type not in ("linear", "cat"):
        raise ValueError(
            f"combination_type={combination_type!r} reads whole factors, but a rank has only "
            "shards; use 'linear' or 'cat', or add the adapter before tensor_parallelize"
        )
    type(self).add_weighted_adapter(
        self, adapters, weights, adapter_name, combination_type, **kwargs
    )


def _shard_adapter(module: Any, adapter: str) -> None:
    """Broadcast the new factors of an adapter from rank 0 and shard them like its layer."""
    base = module.get_base_layer()
    name = base.name.removesuffix(".base_layer")
    for factor in (module.lora_A[adapter].weight, module.lora_B[adapter].weight):
        if not factor.is_meta:
            base.comm.broadcast(factor.data)
    sharded = "lora_A" if isinstance(base, RowParallelLinear) else "lora_B"
    parts = getattr(module, sharded)
    parts[adapter] = _sharded_like(base, parts[adapter], f"{name}.{sharded}.{adapter}")


def _sharded_like(base: Any, factor: nn.Linear, name: str) -> nn.Module:
    """A factor of an adapter, sharded like its layer ``base``."""
    if isinstance(base, RowParallelLinear):
        options = {"input_is_parallel": base.input_is_parallel, "reduce": base.reduce}
    else:
        options = {"gather_output": base.gather_output, "blocks": base.blocks or None}
    options |= {"heads": base.heads, "invariant": base.invariant}
    result: ShardedLinear = type(base).from_linear(factor, base.comm, **options)
    result.name = name
    return result


class Peft(PlanProvider):
    """Models with adapters of peft."""

    library = "peft"

    def base_of(self, model: nn.Module) -> nn.Module:
        if not isinstance(model, sys.modules["peft"].PeftModel):
            return model
        for name, config in model.peft_config.items():
            if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE"):
                raise ValueError(
                    f"peft's adapter {name!r} of the kind {config.peft_type.value} passes keys and "
                    "values of all heads to every layer, but a rank has only some heads; use LoRA "
                    "or prompt tuning"
                )
        base: nn.Module = model.get_base_model()
        return base

    def prepare(self, model: nn.Module) -> None:
        """Let ``save_pretrained`` of a PeftModel save whole factors, and peft shard the adapters
        that ``add_adapter``, ``load_adapter`` and ``add_weighted_adapter`` add to layers which have
        some. They become collectives. And let deep copies keep peft's wrappers of layers."""
        peft: Any = sys.modules["peft"]
        lora: Any = import_module("peft.tuners.lora")
        wrapper: Any = import_module("peft.utils.other").ModulesToSaveWrapper
        if isinstance(model, peft.PeftModel) and sharded_layers(model):
            set_attribute(model, "save_pretrained", MethodType(save_pretrained, model))
        for module in model.modules():
            if isinstance(module, lora.Linear) and isinstance(module.base_layer, ShardedLinear):
                set_attribute(module, "update_layer", MethodType(_update_layer, module))
            elif isinstance(module, lora.LoraModel) and sharded_layers(module):
                set_attribute(module, "add_weighted_adapter", MethodType(_add_weighted, module))
            elif isinstance(module, wrapper):  # It would forward to its layer, and copy that alone.
                set_attribute(module, "__deepcopy__", None)

    def parts_of(self, name: str, module: Any, kind: LayerKind) -> dict[str, nn.Module]:
        """A linear layer with LoRA adapters consists of the layer and the factors that are sharded
        with it: a column-parallel layer's second ones, a row-parallel layer's first ones. A layer
        that adapters train whole consists of the original and theirs."""
        tuners: Any = import_module("peft.tuners")
        others: Any = import_module("peft.utils.other")
        is_saved = isinstance(module, others.ModulesToSaveWrapper)
        if is_saved and not list(module.original_module.children()):
            copies = module.modules_to_save.items()
            return {f"{name}.original_module": module.original_module} | {
                f"{name}.modules_to_save.{adapter}": layer for adapter, layer in copies
            }
        wrappers = tuners.tuners_utils.BaseTunerLayer, others.AuxiliaryTrainingWrapper
        if not isinstance(module, wrappers):
            return {}
        variants = getattr(module, "lora_variant", {}).values()
        if not isinstance(module, tuners.lora.Linear) or variants:
            shown = [type(module), *map(type, variants)]
            raise TypeError(
                f"{name!r} is wrapped by peft's {' and '.join(each.__qualname__ for each in shown)}"
                f" of {type(module).__module__}, which needs the whole layer; merge the adapter "
                "first (merge_and_unload), use plain LoRA, or leave this layer as it is"
            )
        factor = "lora_A" if kind.cuts_input else "lora_B"
        return {f"{name}.base_layer": module.base_layer} | {
            f"{name}.{factor}.{adapter}": layer
            for adapter, layer in getattr(module, factor).items()
        }
