"""Plans for models of transformers: the one that a model carries, ``model.tp_plan``, or a derived
one; what ``tensor_parallelize`` replaces in such models."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from pipekernels.huggingface.batching import init_continuous_batching
from pipekernels.huggingface.derive.derivation import derived_plan
from pipekernels.huggingface.generation import (
    generate,
    get_stopping_criteria,
    unknown_cache_shape,
)
from pipekernels.huggingface.pretrained import resize_token_embeddings, save_pretrained
from pipekernels.tensor_parallel.full_layer import is_experts, set_attribute
from pipekernels.tensor_parallel.functional import Heads
from pipekernels.tensor_parallel.plan.kinds import EXPERTS, GATHERED, Kind, kinds_by_name, parse
from pipekernels.tensor_parallel.plan.sharding_plan import PlanProvider, ShardingPlan
from pipekernels.tensor_parallel.sharded import ShardedLayer

_log = logging.getLogger(__name__)

_METHODS: dict[str, Callable[..., Any]] = {
    "save_pretrained": save_pretrained,
    "resize_token_embeddings": resize_token_embeddings,
    "generate": generate,
    "init_continuous_batching": init_continuous_batching,
    "_get_stopping_criteria": get_stopping_criteria,
    "_get_static_cache_init_shape": unknown_cache_shape,
}
"""What models with sharded layers do otherwise, of what their classes have."""


class Transformers(PlanProvider):
    """Models of transformers."""

    library = "transformers"

    def plan_of(self, model: nn.Module, world_size: int) -> ShardingPlan | None:
        plan = _plan_of(model)
        plan = plan and _with_towers(model, plan, world_size)
        return plan if plan and plan.kinds else None

    def prepare(self, model: nn.Module) -> None:
        transformers: Any = sys.modules["transformers"]
        for module in model.modules():
            has_shards = any(isinstance(each, ShardedLayer) for each in module.modules())
            if isinstance(module, transformers.PreTrainedModel) and has_shards:
                for name, method in _METHODS.items():
                    if hasattr(type(module), name):
                        set_attribute(module, name, MethodType(method, module))


def _plan_of(model: Any) -> ShardingPlan | None:
    """The plan without the towers' plans. Raises ValueError if none can be right."""
    config: Any = getattr(model, "config", None)
    if unfit := _why_unfit(config):
        raise ValueError(
            f"{type(model).__name__} has no plan that is right for ranks with a part of the "
            f"heads: {unfit}; write one for its MLPs"
        )
    if not hasattr(config, "to_dict"):
        return None
    # The model's own plan; completed, or made, by a derived one.
    carried: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    named, _ = kinds_by_name(model, {p: parse(word) or Kind(word) for p, word in carried.items()})
    kinds = _adapted(model, named, config)
    plan = ShardingPlan(kinds, _heads(model, kinds))
    if not any("attn" in name or "attention" in name for name in named):
        plan = _joined(plan, derived_plan(model, _heads))
    # What plans leave out: experts, of which every rank holds a part of each, and the output head.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        if is_experts(module):
            plan.kinds.setdefault(name, EXPERTS)
        elif module is head and type(head) is nn.Linear and plan.kinds:
            plan.kinds.setdefault(name, GATHERED)
        # Gemma 3n: features beyond a number of deviations from their mean are zero.
        if getattr(module, "activation_sparsity", 0) and f"{name}.gate_proj" in plan.kinds:
            raise ValueError(
                f"{name!r} cuts its features off by their mean and deviation "
                f"(activation_sparsity={module.activation_sparsity}), of which a rank would have a "
                "part; leave it whole, in a plan for the attention"
            )
    return plan


def _joined(plan: ShardingPlan, other: ShardingPlan, prefix: str = "") -> ShardingPlan:
    """``plan``, completed by another one for layers that it does not name. ``prefix`` comes before
    the names of the other."""
    named = {prefix + name: kind for name, kind in other.kinds.items()}
    left = {name: kind for name, kind in named.items() if name not in plan.kinds}
    heads = {prefix + name: count for name, count in other.heads.items()}
    divided = {
        prefix + owner: keys
        for owner, keys in other.divided.items()
        if any(name.startswith(f"{prefix}{owner}.") for name in left)
    }
    return ShardingPlan(left | plan.kinds, {**heads, **plan.heads}, {**divided, **plan.divided})


def _with_towers(model: nn.Module, plan: ShardingPlan, world_size: int) -> ShardingPlan:
    """``plan``, with the plans of the models inside ``model`` that it does not cover (a vision
    tower). A tower with fewer heads than ranks stays whole."""
    planned = set(plan.kinds)
    for name, module in model.named_modules():
        prefix = f"{name}."
        is_model = name != "" and hasattr(module, "main_input_name")
        if not is_model or any(other.startswith(prefix) for other in planned):
            continue
        try:
            tower = _plan_of(module)
        except ValueError as error:
            _log.info("%s of %s stays whole: %s", name, type(model).__name__, error)
            continue
        if tower is not None:
            planned |= {prefix + inner for inner in tower.kinds}
            if all(count >= world_size for count, _ in tower.heads.values()):
                plan = _joined(plan, tower, prefix)
    return plan


def _adapted(model: nn.Module, kinds: Mapping[str, Kind], config: Any) -> dict[str, Kind]:
    """``kinds``, with the sizes that are in ``config`` and the latent projections that plans for
    inference leave out, and without what is wrong for it."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    latent = f"mla_kv_a_proj:{getattr(text, 'qk_rope_head_dim', 0)}"
    kind_of_latent = parse(latent) or Kind(latent)
    adapted = dict(kinds)
    for name, _ in model.named_modules():
        inner = name.replace("kv_a_proj_with_mqa", "kv_b_proj")
        if inner != name and inner in kinds:
            adapted.setdefault(name, kind_of_latent)
    # An indexer takes the queries' whole features, and chooses tokens for the heads of all ranks.
    has_indexer = hasattr(text, "index_topk")
    return {
        name: kind_of_latent if kind.word == "mla_kv_a_proj" else kind
        for name, kind in adapted.items()
        if not (has_indexer and ".self_attn" in name) and kind.word != "moe_identity_expert"
    }


_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_ATTENTION = re.compile(r".*(attn|attention)[^.]*", re.IGNORECASE)


def _heads(model: Any, kinds: Mapping[str, Any]) -> dict[str, Heads]:
    """The heads of modules of attention that a plan names."""
    found: dict[str, Heads] = {}
    for name, _ in model.named_modules():
        attention = _ATTENTION.match(name)
        if attention and name in kinds:
            heads, keys = _counts(model.get_submodule(attention[0]), model.config)
            of_keys = {"k_proj", "v_proj"}.intersection(name.split("."))
            found[name] = (keys, keys) if of_keys else (heads, keys)
    return found


def _counts(attention: nn.Module, config: Any) -> Heads:
    """How many heads of queries and of keys a module has."""
    # From the module itself if it says enough, as layers of a model may differ in their heads.
    inner = reversed(list(attention.modules()))
    own: dict[str, Any] = {key: v for module in inner for key, v in vars(module).items()}
    groups, size = own.get("num_key_value_groups"), own.get("head_dim")
    layer = getattr(attention, "k_proj", None)  # Those with adapters have features as well.
    features = getattr(getattr(layer, "linear", layer), "out_features", None)
    if isinstance(groups, int) and isinstance(size, int) and isinstance(features, int):
        return features // size * groups, features // size
    # Else from its configuration, or from the model's.
    config = own.get("config", config)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields = [source.get(field) for source in (own, config.to_dict()) for field in _COUNTS]
    heads = next((n for n in fields if isinstance(n, int)), 1)
    return heads, heads // groups if isinstance(groups, int) else heads


def _why_unfit(config: Any) -> str:
    """Why the plan for a model is wrong here, where its configuration says so; empty otherwise."""
    model_type = getattr(config, "model_type", None)
    if model_type == "doge":
        return "its mask of attention has all heads, of which the carried plan shards the queries'"
    if model_type == "zaya":
        return "it names layers of the router like layers of an MLP"
    return ""
