"""Small copies of models of transformers: the same structure, a few features, random weights; and
inputs that they take: tokens, images and sound, in the usual layouts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.tensor_parallel.full_layer import linear_classes

VOCABULARY, TOKENS, FRAMES, PATCHES = 61, 7, 128, 16
# In each line a size and the fields of configurations that have it. Half of the queries and of the
# inner features are 3 heads and 13 features: what computes in groups of several does not fit them,
# and is not taken for what computes in single ones. States are twice the width, in heads of 8.
_SIZES = f"""
48 hidden_size hidden_sizes d_model n_embd dim embed_dim embedding_size emb_dim lru_width
48 word_embed_proj_dim projection_dim attention_hidden_size output_hidden_size audio_hidden_size
48 cross_attention_hidden_size out_hidden_size text_hidden_size d_latents embed_dim_per_stage
48 projector_hidden_size projection_hidden_dim entity_emb_size visual_feat_dim conv_dim
26 intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim
26 moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size mlp_dim
26 shared_intermediate_size dim_ff d_inner expert_ffn_hidden_size moe_hidden_size dff
26 moe_shared_expert_intermediate_size projection_intermediate_size
6 num_attention_heads n_head n_heads num_heads encoder_attention_heads moe_num_experts
6 decoder_attention_heads num_experts num_local_experts n_routed_experts
6 num_attention_heads_per_layer num_attention_heads_per_stage
2 num_key_value_heads num_experts_per_tok num_experts_per_token num_kv_heads moe_k top_k_experts
2 n_groups eos_token_id
{VOCABULARY} vocab_size decoder_vocab_size vocab_size_per_layer_input entity_vocab_size
{VOCABULARY} unpadded_vocab_size encoder_hash_byte_group_vocab src_vocab_size tgt_vocab_size
96 mamba_d_ssm
12 mamba_n_heads mamba_num_heads
16 kv_lora_rank q_lora_rank qk_head_dim mamba_d_state mamba_chunk_size ssm_state_size
8 qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_d_head mamba_head_dim
1 n_group topk_group n_shared_experts num_expert_group num_shared_experts bos_token_id
1 decoder_start_token_id
8 head_dim dim_head d_kv kv_channels rotary_dim hidden_size_per_layer_input laurel_rank
64 max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len
32 image_size
16 num_conv_pos_embeddings num_mel_bins
4 patch_size attention_window
0 pad_token_id
"""
_FIELDS = {
    field: int(size)
    for size, *fields in map(str.split, _SIZES.strip().splitlines())
    for field in fields
}
_FILLED = (
    "head_dim", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "vocab_size",
    "pad_token_id", "num_key_value_heads",
)  # fmt: skip
MOST_PARAMETERS = 20_000_000


def small_config(config: Any, *, filled: bool = False) -> Any:
    """``config`` of a few features and heads, without randomness in training; its flags, and the
    number of layers, stay.

    Args:
        config: of the large model.
        filled: give sizes where it has None, and rotary sections where it names none.

    Raises:
        ValueError: its class takes no such sizes.
    """
    kept: dict[str, Any] = config.to_dict()
    fields = {name: _small(name, value, kept) for name, value in kept.items()}
    # What a configuration leaves to its class may not fit the small sizes.
    if filled:
        missing = [name for name in _FILLED if name in kept and kept[name] is None]
        fields |= {name: _FIELDS[name] for name in missing}
        if "layer_types" in kept and not kept["layer_types"]:
            fields["layer_types"] = ["full_attention"] * config.num_hidden_layers
        if "attn_layer_indices" in kept and not kept["attn_layer_indices"]:
            fields["attn_layer_indices"] = [1]
        rope = kept.get("rope_parameters")
        if rope and "rope_type" in rope:
            count = int(8 * rope.get("partial_rotary_factor", 1)) // 2
            quarter = max(1, count // 4)
            sections = [count - 2 * quarter, quarter, quarter]
            fields["rope_parameters"] = {**rope, "mrope_section": sections}
    for name, inner in inner_configs(config).items():
        fields[name] = small_config(inner, filled=filled).to_dict()
    # A class may refuse one of the changes: then without this one.
    failure: Exception | None = None
    changed = [name for name, value in fields.items() if value != kept[name]]
    for left in ([], *([name] for name in changed)):
        try:
            return type(config)(**fields | {name: kept[name] for name in left})
        except Exception as error:  # noqa: BLE001 - of validators, setters and constructors
            failure = failure or error
    raise ValueError(f"{type(config).__name__} has no small form: {failure}")


def _small(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """The value of a configuration's field in the small model."""
    size = _FIELDS.get(name)
    # No randomness in training.
    if type(value) is float and ("drop" in name or "jitter" in name or name.endswith("_prob")):
        return value if name == "drop_path_rate" else 0.0  # Of 0.0, modules are of other classes.
    # Sizes. As many heads of keys as of queries stay as many.
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if size is not None and is_list and all(type(v) is int for v in value):
        return [size] * len(value)
    if size is not None and type(value) is int:
        counts_keys = name in ("num_key_value_heads", "num_kv_heads")
        is_of_all = counts_keys and value == fields.get("num_attention_heads")
        return _FIELDS["num_attention_heads"] if is_of_all else size
    # Rotary sections, and configurations by layer.
    if name in ("rope_parameters", "rope_scaling") and "mrope_section" in (value or {}):
        return {**value, "mrope_section": [2, 1, 1]}
    if name == "per_layer_config" and value:
        return {
            layer: {key: _small(key, v, own) for key, v in own.items()}
            for layer, own in value.items()
        }
    return value


def small_model(model_class: type[nn.Module], config: Any) -> Any:
    """A small model of a class and with all layers of a configuration, in evaluation mode, in
    float64 if it runs there. ValueError if it cannot be made, or does not run with inputs that can
    be made here."""
    failure: Exception | None = None
    for filled, dtype in product((False, True), (torch.float64, torch.float32)):
        try:
            small = small_config(config, filled=filled)
            with torch.random.fork_rng(devices=[]):
                model = _new_model(model_class, small, dtype)
                running_inputs(model)
                return model
        except Exception as error:  # noqa: BLE001 - whatever configurations and models raise
            failure = failure or error
    raise ValueError(f"no small {model_class.__name__} can be made: {failure}") from failure


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
        rate = "p" if isinstance(module, nn.Dropout) else "drop_prob"
        if hasattr(module, rate):
            setattr(module, rate, 0.0)
    return model


def running_inputs(model: Any, length: int = TOKENS) -> dict[str, Tensor]:
    """The first inputs with which most linear layers of ``model`` run.

    Raises:
        ValueError: it runs with none, or none can be made.
    """
    failure: Exception | None = None
    found: dict[str, Tensor] | None = None
    layers = [layer for layer in model.modules() if isinstance(layer, linear_classes())]
    ran, most = set[nn.Module](), 0
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda layer, _: ran.add(layer)))
        # Some layouts fail, others leave out a part of the model: an encoder, or images.
        for inputs in _inputs_for(model, length):
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
        why = failure or f"its main input, {model.main_input_name}, is not known here"
        raise ValueError(f"a small {type(model).__name__} does not run: {why}") from failure
    return found


def tensors_of(output: Any) -> list[Tensor]:
    """The floating tensors of a model's output."""
    values = output.values() if isinstance(output, Mapping) else [output]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _inputs_for(model: Any, length: int) -> Iterator[dict[str, Tensor]]:
    """Inputs that the model may take, texts of ``length`` tokens. In each layout: its main one,
    then with what it requires and tokens, images or states, then with all that are known here."""
    parameters = inspect.signature(model.forward).parameters
    main = model.main_input_name
    names = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] or [main]
    main = main if main in names else names[0]  # Some name another.
    required = [n for n, p in parameters.items() if n in names and p.default is p.empty]
    seen: set[tuple[Any, ...]] = set()
    for made in _layouts(model.config, model.dtype, length):
        if main.endswith(("embeds", "hidden_states", "latents")):
            made.setdefault(main, made["query_embeds"])
        if main not in made:
            continue
        # A mask is as long as the text, or the rows of states, of which features come last.
        first = made[main]
        steps = first.shape[-1] if first.dim() == 2 else first.shape[1]
        made["attention_mask"] = torch.ones(2, steps, dtype=torch.long)
        few = [main]
        if getattr(model.config, "is_encoder_decoder", False):
            few.append("decoder_input_ids")
        more = ["input_ids", "pixel_values", "encoder_hidden_states"]
        # Fewest first: running_inputs() takes the first with which most layers run.
        for chosen in (few, [*few, *required, *more], names):
            inputs = {name: made[name] for name in names if name in chosen and name in made}
            layout = tuple((name, value.shape) for name, value in inputs.items())
            if layout not in seen:
                seen.add(layout)
                yield inputs


def _layouts(config: Any, dtype: torch.dtype, length: int) -> Iterator[dict[str, Tensor]]:
    """Inputs by name: images whole and sound as frames of features last; as patches in a row and
    frames in a row; as videos; as rows of patches for each image."""
    # Configurations name what they have in many ways, or not at all.
    sizes = _sizes(config)
    size = sizes.get("image_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _first(sizes, "num_channels in_channels in_chans num_input_channels") or 3
    patch = sizes.get("patch_size") or 4
    patch = patch if isinstance(patch, int) else patch[-1]
    elements = channels * patch * patch
    names = "num_mel_bins feature_projection_input_dim feature_size input_dim"
    features = _first(sizes, f"{names} input_feat_per_channel input_feat_size") or 16
    frames = 2 * (sizes.get("max_source_positions") or FRAMES // 2)
    hidden = sizes.get("hidden_size") or _FIELDS["hidden_size"]

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    tokens = torch.randint(3, VOCABULARY, (2, length))
    grid = torch.tensor([[1, 4, 4]])
    common = {
        "input_ids": tokens,
        "qformer_input_ids": tokens,
        "decoder_input_ids": torch.randint(3, VOCABULARY, (2, max(1, length - 2))),
        "bbox": torch.tensor([1, 2, 3, 4]).expand(2, length, 4),
        "visual_feats": real(2, 3, sizes.get("visual_feat_dim") or 8),
        "visual_pos": real(2, 3, 4),
        "query_embeds": real(2, length, hidden),
        "encoder_hidden_states": real(2, 5, hidden),
        "past_values": real(2, sizes.get("context_length") or 32, channels),
        "grid_thw": grid,
        "image_grid_thw": grid,
        "merge_sizes": torch.tensor([2]),
        "target_sizes": torch.tensor([[4, 4]] * 2),
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
        "pixel_attention_mask": torch.ones(2, PATCHES, dtype=torch.long),
        "pixel_position_ids": torch.cartesian_prod(*[torch.arange(4)] * 2).expand(2, PATCHES, 2),
        "input_features_mask": torch.ones(2, FRAMES, dtype=torch.long),
    }
    yield common | {
        "pixel_values": real(2, channels, height, width),
        "input_features": real(2, features, frames),
        "input_values": real(2, 2000),
    }
    row = real(PATCHES, elements * (sizes.get("temporal_patch_size") or 1))
    sound = real(2, FRAMES, features)
    yield common | {
        "pixel_values": row,
        "hidden_states": row,
        "input_features": sound,
        "audio_mel": sound,
        "audio_mel_mask": torch.zeros(2, FRAMES, dtype=torch.bool),
        "input_values": real(2, sizes.get("max_length") or FRAMES, features),
    }
    yield common | {
        "pixel_values": real(2, sizes.get("num_frames") or 2, channels, height, width),
        "input_values": real(2, 1, 2000),
    }
    yield common | {"pixel_values": real(2, PATCHES, elements)}
    yield common | {"pixel_values": real(PATCHES, channels, patch, patch)}


def inner_configs(config: Any) -> dict[str, Any]:
    """The configurations in ``config``, of a model of several models."""
    found = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    return {name: inner for name, inner in found.items() if inner is not None}


def _sizes(config: Any) -> dict[str, Any]:
    """The fields of a configuration, and its parts' fields that it has not itself."""
    fields: dict[str, Any] = {}
    for _, inner in sorted(inner_configs(config).items()):
        fields |= _sizes(inner)
    return fields | {name: value for name, value in vars(config).items() if value is not None}


def _first(sizes: dict[str, Any], names: str) -> int | None:
    return next((n for name in names.split() if type(n := sizes.get(name)) is int), None)
