"""Plans for models of transformers: the one that a model carries, ``model.tp_plan``, or ours."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from pipekernels.tensor_parallel.changes import set_attribute
from pipekernels.tensor_parallel.full_layer import linear_classes
from pipekernels.tensor_parallel.models.kinds import PACKED, SPLIT, canonical, is_known

_STAYS_WHOLE = "embedding_rowwise"
"""A kind whose modules are left replicated: an embedding is a lookup, not a product."""


class AutoPlan(NamedTuple):
    """What ``tensor_parallelize(model, "auto", comm)`` does to a model."""

    plan: Mapping[str, str]
    divided: Mapping[str, tuple[str, ...]]
    """By patterns for module names: attributes to be divided by the number of ranks."""


def _of(columns: str, rows: str, **others: str) -> dict[str, str]:
    """A plan for the last parts of module names."""
    kinds = dict.fromkeys(columns.split(), "column") | dict.fromkeys(rows.split(), "row")
    return {f"*.{name}": kind for name, kind in (kinds | others).items()}


_BERT = AutoPlan(
    _of("self.query self.key self.value intermediate.dense", "output.dense"),
    {"*.attention.self": ("num_attention_heads", "all_head_size")},
)
_PROJECTIONS = _of("q_proj k_proj v_proj fc1", "out_proj fc2")
_TABLES = {
    "bert": _BERT,
    "distilbert": AutoPlan(
        _of("q_lin k_lin v_lin lin1", "out_lin lin2"), {"*.attention": ("n_heads", "dim")}
    ),
    "gpt2": AutoPlan(
        _of("c_fc", "c_proj", c_attn=f"{PACKED}:3"), {"*.attn": ("num_heads", "split_size")}
    ),
    "opt": AutoPlan(_PROJECTIONS, {"*.self_attn": ("num_heads",)}),
    "roberta": _BERT,
    "t5": AutoPlan(
        _of("q k v wi wi_0 wi_1", "o wo", relative_attention_bias=SPLIT),
        {"*.SelfAttention": ("n_heads",), "*.EncDecAttention": ("n_heads",)},
    ),
    "vit": AutoPlan(
        _of("q_proj k_proj v_proj fc1", "o_proj fc2"), {"*.attention": ("num_attention_heads",)}
    ),
    "whisper": AutoPlan(_PROJECTIONS, {"*_attn": ("num_heads",)}),
}
"""By ``model.config.model_type``. A pattern may match nothing in one of its models."""


def auto_plan(model: nn.Module, world_size: int) -> AutoPlan:
    """The plan for ``tensor_parallelize(model, "auto", comm)``. Embeddings, and an output head tied
    to one, stay replicated.

    Args:
        model: the full model.
        world_size: number of ranks.

    Raises:
        ValueError: there is no plan for the model, or it has kinds that are not supported, or the
            attention heads cannot be dealt out evenly.
    """
    config: Any = getattr(model, "config", None)
    carried: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    names = [name for name, _ in model.named_modules()]
    if carried:
        auto = AutoPlan({pattern: canonical(word) for pattern, word in carried.items()}, {})
    elif getattr(config, "model_type", None) in _TABLES:
        plan, divided = _TABLES[config.model_type]
        used = {p: kind for p, kind in plan.items() if any(fnmatchcase(name, p) for name in names)}
        auto = AutoPlan(used, divided)
    else:
        layers = [n for n, module in model.named_modules() if isinstance(module, linear_classes())]
        shown = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(
            f"{type(model).__name__} carries no plan (tp_plan), and there is none for it here; "
            "write one that names its linear layers, such as {'*.q_proj': 'column', '*.o_proj': "
            f"'row'}}; it has {shown or 'no linear layers'}"
        )
    known = {p: kind for p, kind in auto.plan.items() if is_known(kind)}
    unknown = {p: k for p, k in auto.plan.items() if p not in known and k != _STAYS_WHOLE}
    if unknown:
        raise ValueError(
            f"the plan of {type(model).__name__} has kinds that are not supported: {unknown}; "
            "write a plan that leaves these modules as they are"
        )
    tied = _tied_modules(model)
    plan = {p: kind for p, kind in known.items() if not any(fnmatchcase(n, p) for n in tied)}
    if not {"column", f"{PACKED}:3"}.isdisjoint(plan.values()):
        _check_heads(model, config, world_size)
    return AutoPlan(plan, auto.divided)


def divide(model: nn.Module, divided: Mapping[str, tuple[str, ...]], world_size: int) -> None:
    """Divide the attributes of modules that depend on the number of heads."""
    for name, module in model.named_modules():
        for pattern, attributes in divided.items():
            if fnmatchcase(name, pattern):
                for attribute in attributes:
                    set_attribute(module, attribute, getattr(module, attribute) // world_size)


def _tied_modules(model: nn.Module) -> list[str]:
    """Names of modules that share a parameter with another module."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(name)
    return [name for names in owners.values() if len(names) > 1 for name in names]


def _check_heads(model: nn.Module, config: Any, world_size: int) -> None:
    fields = ("num_attention_heads", "num_key_value_heads", "decoder_attention_heads")
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for field in fields:
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % world_size:
            raise ValueError(
                f"{type(model).__name__} has {field}={heads}, which {world_size} ranks cannot "
                "share evenly; use a number of ranks that divides it, or write a plan that shards "
                "its MLPs only"
            )
