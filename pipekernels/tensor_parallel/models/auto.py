"""Plans for models of transformers: the one that a model carries, ``model.tp_plan``, or ours."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from pipekernels.tensor_parallel.changes import set_attribute
from pipekernels.tensor_parallel.full_layer import is_embedding, is_hooked, linear_classes
from pipekernels.tensor_parallel.models.kinds import (
    ALIBI,
    ATTENTION,
    COLUMN,
    EMBEDDING,
    GATHERED,
    PACKED,
    SHARED,
    SPLIT,
    canonical,
    is_known,
)


class _Table(NamedTuple):
    plan: Mapping[str, str]
    divided: Mapping[str, tuple[str, ...]]
    """By patterns for module names: attributes to be divided by the number of ranks."""


class AutoPlan(NamedTuple):
    """What ``tensor_parallelize(model, "auto", comm)`` does to a model."""

    plan: Mapping[str, str]
    divided: Mapping[str, Mapping[str, int]]
    """By patterns for module names: attributes, and what each is to be divided by."""


def _of(columns: str, rows: str, **others: str) -> dict[str, str]:
    """A plan for the last parts of module names."""
    kinds = dict.fromkeys(columns.split(), "column") | dict.fromkeys(rows.split(), "row")
    return {f"*.{name}": kind for name, kind in (kinds | others).items()}


_BERT = _Table(
    _of("self.query self.key self.value intermediate.dense", "output.dense"),
    {"*.attention.self": ("num_attention_heads", "all_head_size")},
)
_PROJECTIONS = _of("q_proj k_proj v_proj fc1", "out_proj fc2")
_TABLES = {
    "bert": _BERT,
    "bloom": _Table(
        _of(
            "query_key_value dense_h_to_4h",
            "self_attention.dense dense_4h_to_h",
            self_attention=ALIBI,
        ),
        # Without slow_but_exact, which cuts weights by hand.
        {"*.self_attention": ("num_heads", "slow_but_exact"), "*.mlp": ("slow_but_exact",)},
    ),
    "distilbert": _Table(
        _of("q_lin k_lin v_lin lin1", "out_lin lin2"), {"*.attention": ("n_heads", "dim")}
    ),
    "gpt2": _Table(
        _of("c_fc", "c_proj", c_attn=f"{PACKED}:3"), {"*.attn": ("num_heads", "split_size")}
    ),
    # Queries, with one head of keys and values, are fused into one layer.
    "gpt_bigcode": _Table(
        {
            "*.attn.c_attn": GATHERED,
            "*.attn.c_proj": "row_split_input",
            "*.mlp.c_fc": COLUMN,
            "*.mlp.c_proj": "row",
        },
        {},
    ),
    "opt": _Table(_PROJECTIONS, {"*.self_attn": ("num_heads",)}),
    "roberta": _BERT,
    "t5": _Table(
        _of("q k v wi wi_0 wi_1", "o wo", relative_attention_bias=SPLIT),
        {"*.SelfAttention": ("n_heads",), "*.EncDecAttention": ("n_heads",)},
    ),
    "vit": _Table(
        _of("q_proj k_proj v_proj fc1", "o_proj fc2"), {"*.attention": ("num_attention_heads",)}
    ),
    "whisper": _Table(_PROJECTIONS, {"*_attn": ("num_heads",)}),
}
"""By ``model.config.model_type``. A pattern may match nothing in one of its models."""


def auto_plan(model: nn.Module, world_size: int) -> AutoPlan:
    """The plan for ``tensor_parallelize(model, "auto", comm)``.

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
    divided = {}
    if carried:
        plan = {pattern: canonical(word) for pattern, word in carried.items()}
    elif getattr(config, "model_type", None) in _TABLES:
        table = _TABLES[config.model_type]
        plan = {p: k for p, k in table.plan.items() if any(fnmatchcase(name, p) for name in names)}
        plan |= dict.fromkeys(_output_head(model), GATHERED)
        divided = {p: dict.fromkeys(keys, world_size) for p, keys in table.divided.items()}
    elif any(isinstance(module, _TORCH_LAYERS) for module in model.modules()):
        plan = _of_torch_layers(model)
    else:
        layers = [n for n, module in model.named_modules() if isinstance(module, linear_classes())]
        shown = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(
            f"{type(model).__name__} carries no plan (tp_plan), and there is none for it here; "
            "write one that names its linear layers, such as {'*.q_proj': 'column', '*.o_proj': "
            f"'row'}}; it has {shown or 'no linear layers'}"
        )
    unknown = {pattern: kind for pattern, kind in plan.items() if not is_known(kind)}
    if unknown:
        raise ValueError(
            f"the plan of {type(model).__name__} has kinds that are not supported: {unknown}; "
            "write a plan that leaves these modules as they are"
        )
    plan = _with_tied(model, plan)
    columns = [p for p, kind in plan.items() if kind.partition(":")[0] in (COLUMN, PACKED)]
    if divided or any("attn" in pattern or "attention" in pattern for pattern in columns):
        keys = [pattern for pattern in columns if pattern.endswith((".k_proj", ".v_proj"))]
        copies = _key_copies(model, config, keys, world_size)
        if copies > 1:
            plan |= dict.fromkeys(keys, f"{SHARED}:{copies}")
            divided |= {"*": {"num_key_value_groups": copies}}
    return AutoPlan(plan, divided)


def divide(model: nn.Module, divided: Mapping[str, Mapping[str, int]]) -> None:
    """Divide the attributes of modules that depend on the number of heads."""
    for name, module in model.named_modules():
        for pattern, attributes in divided.items():
            if fnmatchcase(name, pattern):
                for attribute, divisor in attributes.items():
                    if hasattr(module, attribute):
                        set_attribute(module, attribute, getattr(module, attribute) // divisor)


_TORCH_LAYERS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def _of_torch_layers(model: nn.Module) -> dict[str, str]:
    """A plan for torch's own layers; the other ones of such a model stay replicated."""
    plan = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            plan[name] = ATTENTION
        elif isinstance(module, _TORCH_LAYERS):
            prefix = f"{name}." if name else ""
            plan |= {f"{prefix}linear1": COLUMN, f"{prefix}linear2": "row"}
    return plan


def _output_head(model: Any) -> list[str]:
    """The name of the model's output head, if it has one that can be sharded."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [n for n, module in model.named_modules() if module is head and type(head) is nn.Linear]


def _with_tied(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """``plan`` with the embeddings that share the weight of a sharded head; without the layers that
    share a parameter with something else, and without embeddings that are more than a lookup or
    have hooks, such as that of gradient checkpointing."""

    def kind_of(name: str) -> str | None:
        return next((kind for p, kind in plan.items() if fnmatchcase(name, p)), None)

    modules = dict(model.named_modules())
    whole = {
        name
        for name, module in modules.items()
        if kind_of(name) == EMBEDDING and (not is_embedding(module) or is_hooked(module))
    }
    added: dict[str, str] = {}
    for names in _tied_modules(model):
        heads = [name for name in names if kind_of(name) == GATHERED]
        others = [name for name in names if name not in heads]
        lookups = [modules[name] for name in others]
        if heads and all(is_embedding(m) and not is_hooked(m) for m in lookups):
            added |= dict.fromkeys(others, EMBEDDING)
        else:
            whole.update(names)
    while any(0 < len(whole.intersection(names)) < len(names) for names in _tied_modules(model)):
        whole.update(*(names for names in _tied_modules(model) if whole.intersection(names)))
    kept = {p: kind for p, kind in plan.items() if not any(fnmatchcase(n, p) for n in whole)}
    return kept | {name: kind for name, kind in added.items() if name not in whole}


def _tied_modules(model: nn.Module) -> list[list[str]]:
    """Names of modules that share a parameter."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _key_copies(model: nn.Module, config: Any, keys: list[str], world_size: int) -> int:
    """How many ranks hold each key head. ValueError if heads cannot be dealt out evenly."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for field in ("num_attention_heads", "decoder_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if not isinstance(heads, int) or heads % world_size == 0:
            continue
        if field == "num_key_value_heads" and world_size % heads == 0 and keys:
            return world_size // heads
        raise ValueError(
            f"{type(model).__name__} has {field}={heads}, which {world_size} ranks cannot share "
            "evenly; use a number of ranks that divides it, or write a plan that shards its MLPs "
            "only"
        )
    return 1
