"""Small copies of models of transformers: the same structure, a few features, random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.huggingface.derive.small_inputs import (
    TOKENS,
    VOCABULARY,
    inner_configs,
    inputs_for,
)
from pipekernels.tensor_parallel.full_layer import linear_classes

LAYERS, KEYS, LENGTH = 2, 2, 64
_SMALL = {"width": 32, "inner": 48, "queries": 4, "states": 64, "state_heads": 8}
# Of a copy with all layers. Half are 13 features and 3 heads: what computes in groups of several
# does not fit them, and is not taken for what computes in single ones.
_DEEP = {"width": 48, "inner": 26, "queries": 6, "states": 96, "state_heads": 12}
_SAME = {"layers": LAYERS, "keys": KEYS, "length": LENGTH, "vocabulary": VOCABULARY}
# In each line a size, by name or number, and the fields of configurations that have it. States are
# twice the width, in heads of 8 features each.
_SIZES = """
width hidden_size hidden_sizes d_model n_embd dim embed_dim embedding_size d_embed emb_dim model_dim
width word_embed_proj_dim projection_dim attention_hidden_size lru_width conv_dim output_hidden_size
width cross_attention_hidden_size out_hidden_size text_hidden_size audio_hidden_size d_latents
width projector_hidden_size projection_hidden_dim entity_emb_size text_embed_dim visual_feat_dim
width embed_dim_per_stage
inner intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim inner_dim
inner moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size mlp_dim block_ff_dim
inner shared_intermediate_size dim_ff d_inner expert_ffn_hidden_size moe_hidden_size dff
inner moe_shared_expert_intermediate_size projection_intermediate_size
layers num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth
layers num_decoder_layers num_encoder_layers
queries num_attention_heads n_head n_heads num_heads encoder_attention_heads moe_num_experts
queries decoder_attention_heads num_experts num_local_experts n_routed_experts
queries num_attention_heads_per_layer num_attention_heads_per_stage
keys num_key_value_heads num_experts_per_tok num_experts_per_token num_kv_heads moe_k top_k_experts
keys n_groups attn_layer_period
vocabulary vocab_size decoder_vocab_size vocab_size_per_layer_input entity_vocab_size
vocabulary unpadded_vocab_size encoder_hash_byte_group_vocab src_vocab_size tgt_vocab_size
states mamba_d_ssm
state_heads mamba_n_heads mamba_num_heads
16 kv_lora_rank q_lora_rank qk_head_dim mamba_d_state mamba_chunk_size ssm_state_size
8 qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_d_head mamba_head_dim
1 n_group topk_group first_k_dense_replace depths blocks_per_stage n_shared_experts num_expert_group
1 num_shared_experts attn_layer_indices attn_layer_offset bos_token_id decoder_start_token_id
8 head_dim dim_head d_kv kv_channels rotary_dim hidden_size_per_layer_input laurel_rank
length max_position_embeddings n_positions n_ctx max_source_positions max_target_positions
length max_seq_len
32 image_size
16 num_conv_pos_embeddings num_mel_bins
4 patch_size attention_window
0 pad_token_id num_kv_shared_layers
2 eos_token_id
"""


def _fields(sizes: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for size, *fields in map(str.split, _SIZES.strip().splitlines()):
        found |= dict.fromkeys(fields, int(size) if size.isdecimal() else sizes[size])
    return found


_FIELDS, _DEEP_FIELDS = _fields(_SAME | _SMALL), _fields(_SAME | _DEEP)
_COUNTS = [field for field, size in _FIELDS.items() if size == LAYERS and "layer" in field]
_FILLED = (
    "head_dim", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "vocab_size",
    "pad_token_id", "num_key_value_heads",
)  # fmt: skip
_OF_LAYERS = (
    "first_k_dense_replace", "depths", "blocks_per_stage", "attn_layer_indices",
    "attn_layer_offset", "attn_layer_period", "num_kv_shared_layers", "depth",
)  # fmt: skip
MOST_PARAMETERS = 20_000_000


def small_config(config: Any, *, filled: bool = False, deep: bool = False) -> Any:
    """``config`` of a few features, heads and layers, without randomness in training; its flags
    stay.

    Args:
        config: of the large model.
        filled: give sizes where it has None, and rotary sections where it names none.
        deep: keep all layers.

    Raises:
        ValueError: its class takes no such sizes.
    """
    kept: dict[str, Any] = config.to_dict()
    layers = None if deep else _sampled_layers(kept)
    fields = {name: _small(name, value, kept, layers) for name, value in kept.items()}
    # What a configuration leaves to its class may not fit the small sizes.
    if filled:
        missing = [name for name in _FILLED if name in kept and kept[name] is None]
        fields |= {name: _FIELDS[name] for name in missing}
        if "layer_types" in kept and not kept["layer_types"]:
            fields["layer_types"] = ["full_attention"] * (_count(kept) if deep else LAYERS)
        if set(fields.get("layer_types") or ()) == {"linear_attention"}:
            fields["layer_types"] = ["linear_attention", "full_attention"]
        if "attn_layer_indices" in kept and not kept["attn_layer_indices"]:
            fields["attn_layer_indices"] = [LAYERS - 1]
        rope = kept.get("rope_parameters")
        if rope and "rope_type" in rope:
            count = int(8 * rope.get("partial_rotary_factor", 1)) // 2
            quarter = max(1, count // 4)
            sections = [count - 2 * quarter, quarter, quarter]
            fields["rope_parameters"] = {**rope, "mrope_section": sections}
    for name, inner in inner_configs(config).items():
        fields[name] = small_config(inner, filled=filled, deep=deep).to_dict()
    # A class may refuse one of the changes: then without this one.
    failure: Exception | None = None
    changed = [name for name, value in fields.items() if value != kept[name]]
    for left in ([], *([name] for name in changed)):
        try:
            return type(config)(**fields | {name: kept[name] for name in left})
        except Exception as error:  # noqa: BLE001 - of validators, setters and constructors
            failure = failure or error
    raise ValueError(f"{type(config).__name__} has no small form: {failure}")


def _sampled_layers(fields: Mapping[str, Any]) -> list[int]:
    """The layers of the small model: the first one, and the first one of another type."""
    count = _count(fields)
    per_layer = [v for v in fields.values() if _is_list(v) and len(v) == count]
    # The type of each layer: its words, such as in layer_types, without numbers.
    types = [[v for v in values if isinstance(v, str)] for values in zip(*per_layer, strict=True)]
    unlike = [sum(map(str.__ne__, own, types[0])) for own in types] or [0, 0]
    return [0, unlike.index(max(unlike)) or min(1, count - 1)]


def _count(fields: Mapping[str, Any]) -> int:
    """The number of layers."""
    return next((n for name in _COUNTS if type(n := fields.get(name)) is int), 0)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0


def _small(name: str, value: Any, fields: Mapping[str, Any], layers: Sequence[int] | None) -> Any:
    """The value of a configuration's field in the small model, which keeps ``layers``, or all."""
    sizes = _DEEP_FIELDS if layers is None else _FIELDS
    size = sizes.get(name)
    # No randomness in training.
    if type(value) is float and ("drop" in name or "jitter" in name or name.endswith("_prob")):
        return value if name == "drop_path_rate" else 0.0  # Of 0.0, modules are of other classes.
    # Values by layer: those of the layers that are kept.
    if layers is None:
        if name in _COUNTS or name in _OF_LAYERS or name == "block_types":
            return value
        layers = range(_count(fields))
    if _is_list(value) and len(value) == _count(fields) and size != LAYERS:
        value = [value[layer] for layer in layers]
    # Sizes. As many heads of keys as of queries stay as many.
    if size is not None and _is_list(value) and all(type(v) is int for v in value):
        return [size] * len(value)
    if size is not None and type(value) is int:
        counts_keys = name in ("num_key_value_heads", "num_kv_heads")
        is_of_all = counts_keys and value == fields.get("num_attention_heads")
        return sizes["num_attention_heads"] if is_of_all else size
    # Lists of types that repeat, rotary sections, and configurations by layer.
    if name == "block_types" or (name == "layers_block_type" and not _count(fields)):
        return list(dict.fromkeys(value))
    if name in ("rope_parameters", "rope_scaling") and "mrope_section" in (value or {}):
        return {**value, "mrope_section": [2, 1, 1]}
    if name == "per_layer_config" and value:
        by_layer = {int(layer): own for layer, own in value.items()}
        return {
            i: {key: _small(key, v, by_layer[layer], ()) for key, v in by_layer[layer].items()}
            for i, layer in enumerate(layers)
            if layer in by_layer
        }
    return value


def small_model(
    model_class: type[nn.Module], config: Any, *, deep: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model in evaluation mode with inputs that it takes, in float64 if it runs there.

    Args:
        model_class: of transformers.
        config: the configuration of the large model.
        deep: with all layers, else with two.

    Raises:
        ValueError: it cannot be made, or does not run with inputs that can be made here.
    """
    failure: Exception | None = None
    with torch.random.fork_rng():
        for filled, dtype in product((False, True), (torch.float64, torch.float32)):
            try:
                small = small_config(config, filled=filled, deep=deep)
                model = _new_model(model_class, small, dtype)
                return model, running_inputs(model, dtype)
            except Exception as error:  # noqa: BLE001 - whatever configurations and models raise
                failure = failure or error
    raise ValueError(f"a small {model_class.__name__} does not run: {failure}") from failure


def _new_model(model_class: Any, small: Any, dtype: torch.dtype) -> Any:
    for part in (small, *inner_configs(small).values()):
        part._attn_implementation = part._experts_implementation = "eager"
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(small).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters in the small form")
    torch.manual_seed(0)
    model = model_class(small).to(dtype).eval()
    # Biases of zeros and norms of ones would hide what a wrong plan does to them.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.05
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    return model


def running_inputs(model: Any, dtype: torch.dtype, length: int = TOKENS) -> dict[str, Tensor]:
    """The inputs with which most linear layers of ``model`` run, the first of those. Raises what it
    first raised; ValueError if none can be made."""
    failure: Exception | None = None
    found: dict[str, Tensor] | None = None
    layers = [layer for layer in model.modules() if isinstance(layer, linear_classes())]
    ran, most = set[nn.Module](), 0
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda layer, _: ran.add(layer)))
        # Some layouts fail, others leave out a part of the model: an encoder, or images.
        for inputs in inputs_for(model, dtype, length):
            ran.clear()
            try:
                model(**inputs)
            except Exception as error:  # noqa: BLE001 - whatever the model raises
                failure = failure or error
                continue
            if found is None or len(ran) > most:
                found, most = inputs, len(ran)
            if most == len(layers):
                break
    if found is None:
        raise failure or ValueError(f"its main input, {model.main_input_name}, is not known here")
    return found


def tensors_of(output: Any) -> list[Tensor]:
    """The floating tensors of a model's output."""
    values = output.values() if isinstance(output, Mapping) else [output]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
