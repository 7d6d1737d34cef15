"""Plans for models of transformers: the one that a model carries, ``model.tp_plan``, or ours."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pipekernels.huggingface.derived_plans import derived_plan
from pipekernels.huggingface.generation import adapt_generate, warn_of_attentions
from pipekernels.huggingface.pretrained import save_full_models
from pipekernels.tensor_parallel.experts import is_experts
from pipekernels.tensor_parallel.functional import Heads
from pipekernels.tensor_parallel.plan.providers import PlanProvider, ProvidedPlan, base_of
from pipekernels.tensor_parallel.sharded import sharded_layers

_log = logging.getLogger(__name__)


class Transformers(PlanProvider):
    """Models of transformers."""

    def plan_of(self, model: nn.Module) -> ProvidedPlan | None:
        config: Any = getattr(model, "config", None)
        if unfit := _why_unfit(config):
            raise ValueError(
                f"{type(model).__name__} has no plan that is right for ranks with a part of the "
                f"heads: {unfit}; write one for its MLPs"
            )
        if not hasattr(config, "to_dict"):
            return None
        # The model's own plan, or our table; completed, or made, by a derived one.
        carried: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
        known = ProvidedPlan(carried) if carried else _TABLES.get(getattr(config, "model_type", ""))
        plan = known
        if plan is None or (carried and not _names_attention(model, carried)):
            plan = _with_derived(model, carried, derived_plan(model, config))
        heads = _heads(model, plan.words, config)
        if plan is not known:
            # A derived plan counts groups of a key head and its queries. The configuration counts
            # the queries as well, but may be of another attention than this one.
            counted = {name: heads.get(name, own) for name, own in plan.heads.items()}
            heads = {
                name: counted[name] if counted[name][1] == own[1] else own
                for name, own in plan.heads.items()
            }
        # What plans leave out: experts, what the configuration adds, and the output head.
        words = {**_experts(model, plan.words), **_adapted(model, plan.words, config)}
        for head in _output_head(model):
            if words and not any(fnmatchcase(head, pattern) for pattern in words):
                words[head] = "column_gather_output"
        _check_functions(model, words)
        towers = self._towers(model, words)
        return plan._replace(words=words, heads=heads, towers=towers) if words or towers else None

    def _towers(self, model: nn.Module, words: Mapping[str, str]) -> dict[str, ProvidedPlan]:
        """Plans of the outermost models inside ``model`` of which ``words`` names nothing."""
        names = dict(model.named_modules())
        planned = [f"{n}." for n in names if any(fnmatchcase(n, pattern) for pattern in words)]
        found: dict[str, ProvidedPlan] = {}
        for name, module in names.items():
            is_model = name != "" and hasattr(module, "main_input_name")
            has_plan = any(planned_name.startswith(f"{name}.") for planned_name in planned)
            if not is_model or has_plan or name.startswith(tuple(f"{tower}." for tower in found)):
                continue
            try:
                plan = self.plan_of(module)
            except ValueError as error:
                _log.info("%s of %s stays whole: %s", name, type(model).__name__, error)
                continue
            if plan is not None:
                found[name] = plan._replace(towers={})
                found |= {f"{name}.{tower}": inner for tower, inner in plan.towers.items()}
        return found

    def prepare(self, model: nn.Module) -> None:
        save_full_models(model)
        adapt_generate(model)
        if sharded_layers(model):
            warn_of_attentions(base_of(model))


def _check_functions(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Raise ValueError if a function between two sharded layers needs all features."""
    for name, module in model.named_modules():
        # Gemma 3n: features beyond a number of deviations from their mean are zero.
        is_planned = any(fnmatchcase(f"{name}.gate_proj", pattern) for pattern in plan)
        if getattr(module, "activation_sparsity", 0) and is_planned:
            raise ValueError(
                f"{name!r} cuts its features off by their mean and deviation "
                f"(activation_sparsity={module.activation_sparsity}), of which a rank would have a "
                "part; leave it whole, in a plan for the attention"
            )


def _names_attention(model: nn.Module, carried: Mapping[str, str]) -> bool:
    names = [n for n, _ in model.named_modules() if "attn" in n or "attention" in n]
    return any(fnmatchcase(name, pattern) for name in names for pattern in carried)


def _with_derived(
    model: nn.Module, carried: Mapping[str, str], derived: ProvidedPlan
) -> ProvidedPlan:
    """The model's own plan, completed by a derived one for layers that it does not name."""
    words = {
        name: word
        for name, word in derived.words.items()
        if not any(fnmatchcase(name, pattern) for pattern in carried)
    }
    divided = {
        owner: keys
        for owner, keys in derived.divided.items()
        if any(name.startswith(f"{owner}.") for name in words)
    }
    return ProvidedPlan(words | dict(carried), divided, derived.heads)


def _experts(model: nn.Module, words: Mapping[str, str]) -> dict[str, str]:
    """Experts that a plan does not name are sliced: every rank holds a part of each."""
    return {
        name: "experts"
        for name, module in model.named_modules()
        if is_experts(module) and not any(fnmatchcase(name, pattern) for pattern in words)
    }


def _adapted(model: nn.Module, words: Mapping[str, str], config: Any) -> dict[str, str]:
    """``words``, with the sizes that are in ``config`` and the latent projections that plans for
    inference leave out, and without what is wrong for it."""
    words = dict(words)
    for name, _ in model.named_modules():
        inner = name.replace("kv_a_proj_with_mqa", "kv_b_proj")
        named = [any(fnmatchcase(n, pattern) for pattern in words) for n in (name, inner)]
        if inner != name and named == [False, True]:
            words[name] = "mla_kv_a_proj"
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "qk_rope_head_dim", 0)
    # An indexer takes the queries' whole features, and chooses tokens for the heads of all ranks.
    has_indexer = hasattr(text, "index_topk")
    return {
        pattern: f"{word}:{size}" if word == "mla_kv_a_proj" else word
        for pattern, word in words.items()
        if not (has_indexer and ".self_attn" in pattern) and word != "moe_identity_expert"
    }


_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_ATTENTION = re.compile(r".*(attn|attention)[^.]*", re.IGNORECASE)


def _heads(model: nn.Module, words: Mapping[str, str], config: Any) -> dict[str, Heads]:
    """The heads of modules of attention that a plan names."""
    found: dict[str, Heads] = {}
    for name, _ in model.named_modules():
        attention = _ATTENTION.match(name)
        if attention and any(fnmatchcase(name, pattern) for pattern in words):
            heads, keys = _counts(model.get_submodule(attention[0]), config)
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
    # Else from its configuration, or from that of the model.
    config = own.get("config", config)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields = [source.get(field) for source in (own, config.to_dict()) for field in _COUNTS]
    heads = next((n for n in fields if isinstance(n, int)), 1)
    return heads, heads // groups if isinstance(groups, int) else heads


def _output_head(model: Any) -> list[str]:
    """The name of the model's output head, if it has one that can be sharded."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [n for n, module in model.named_modules() if module is head and type(head) is nn.Linear]


def _kinds(columns: str, rows: str, **others: str) -> dict[str, str]:
    """Kinds by the last parts of module names."""
    kinds = dict.fromkeys(columns.split(), "column") | dict.fromkeys(rows.split(), "row")
    return {f"*.{name}": kind for name, kind in (kinds | others).items()}


_BERT = ProvidedPlan(
    _kinds("self.query self.key self.value intermediate.dense", "output.dense"),
    {"*.attention.self": ("num_attention_heads", "all_head_size")},
)
_PROJECTIONS = _kinds("q_proj k_proj v_proj fc1", "out_proj fc2")
_TABLES = {
    "bert": _BERT,
    "bloom": ProvidedPlan(
        _kinds(
            "query_key_value dense_h_to_4h",
            "self_attention.dense dense_4h_to_h",
            self_attention="split_alibi",
        ),
        # Without slow_but_exact, which cuts weights by hand.
        {"*.self_attention": ("num_heads", "slow_but_exact"), "*.mlp": ("slow_but_exact",)},
    ),
    "distilbert": ProvidedPlan(
        _kinds("q_lin k_lin v_lin lin1", "out_lin lin2"), {"*.attention": ("n_heads", "dim")}
    ),
    "gpt2": ProvidedPlan(
        _kinds("c_fc q_attn", "c_proj")
        | {"*.attn.c_attn": "packed_column:3", "*.crossattention.c_attn": "packed_column:2"},
        dict.fromkeys(("*.attn", "*.crossattention"), ("num_heads", "split_size")),
    ),
    # Queries, with one head of keys and values, are fused into one layer.
    "gpt_bigcode": ProvidedPlan(
        _kinds("mlp.c_fc", "mlp.c_proj")
        | {"*.attn.c_attn": "column_gather_output", "*.attn.c_proj": "row_split_input"}
    ),
    "opt": ProvidedPlan(_PROJECTIONS, {"*.self_attn": ("num_heads",)}),
    "roberta": _BERT,
    "t5": ProvidedPlan(
        _kinds("q k v wi wi_0 wi_1", "o wo", relative_attention_bias="split_output"),
        {"*.SelfAttention": ("n_heads",), "*.EncDecAttention": ("n_heads",)},
    ),
    "vit": ProvidedPlan(
        _kinds("q_proj k_proj v_proj fc1", "o_proj fc2"), {"*.attention": ("num_attention_heads",)}
    ),
    "whisper": ProvidedPlan(_PROJECTIONS, {"*_attn": ("num_heads",)}),
}
"""By ``model.config.model_type``."""


def _why_unfit(config: Any) -> str:
    """Why the plan for a model is wrong here, where its configuration says so; empty otherwise."""
    model_type = getattr(config, "model_type", None)
    if model_type == "doge":
        return "its mask of attention has all heads, of which the carried plan shards the queries'"
    if model_type == "zaya":
        return "it names layers of the router like those of an MLP"
    if model_type == "gpt_bigcode" and config.add_cross_attention:
        return "its cross-attention splits one layer into keys and values of all heads"
    return ""
