"""Small copies of models of transformers: the same structure, a few features, random weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, INNER, LAYERS, QUERIES, KEYS, VOCABULARY, LENGTH = 32, 48, 2, 4, 2, 61, 64
_SIZES = (
    (
        WIDTH,
        """
        hidden_size d_model n_embd dim embed_dim embedding_size d_embed word_embed_proj_dim
        projection_dim attention_hidden_size lru_width conv_dim cross_attention_hidden_size
        emb_dim model_dim output_hidden_size
        """,
    ),
    (
        INNER,
        """
        intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim
        moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size inner_dim
        mlp_dim shared_intermediate_size block_ff_dim dim_ff d_inner
        """,
    ),
    (
        LAYERS,
        """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers depth
        """,
    ),
    (
        QUERIES,
        """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_experts num_local_experts n_routed_experts
        moe_num_experts
        """,
    ),
    (KEYS, "num_key_value_heads num_experts_per_tok num_kv_heads moe_k top_k_experts"),
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    (16, "kv_lora_rank q_lora_rank"),
    (8, "qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim"),
    (1, "n_group topk_group first_k_dense_replace"),
    (8, "head_dim dim_head d_kv kv_channels rotary_dim hidden_size_per_layer_input laurel_rank"),
    (
        LENGTH,
        """
        max_position_embeddings n_positions n_ctx max_source_positions max_target_positions
        max_seq_len
        """,
    ),
    (16, "image_size num_conv_pos_embeddings"),
    (4, "patch_size num_mel_bins"),
    (1, "bos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
    (2, "eos_token_id"),
)
_FIELDS = {field: size for size, fields in _SIZES for field in fields.split()}
_PER_LAYER = ("layer_types", "mlp_layer_types", "intermediate_size")
MOST_PARAMETERS = 20_000_000


def small_config(config: Any) -> Any:
    """``config`` of a few features, heads and layers; its flags stay.

    Raises:
        ValueError: its class takes no such sizes.
    """
    fields: dict[str, Any] = config.to_dict()
    queries = fields.get("num_attention_heads")
    for name, value in fields.items():
        if type(value) is int and name in _FIELDS:
            fields[name] = _FIELDS[name]
            if name in ("num_key_value_heads", "num_kv_heads") and value == queries:
                fields[name] = QUERIES
        elif name in _PER_LAYER and isinstance(value, (list, tuple)) and value:
            kinds = [INNER] if name == "intermediate_size" else list(dict.fromkeys(value))
            fields[name] = (kinds[:LAYERS] * LAYERS)[:LAYERS]
        elif name in ("rope_parameters", "rope_scaling") and "mrope_section" in (value or {}):
            fields[name] = {**value, "mrope_section": [2, 1, 1]}
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            fields[name] = small_config(inner).to_dict()
    kept = config.to_dict()
    failure: Exception | None = None
    changed = [name for name, value in fields.items() if value != kept[name]]
    for left in ([], *([name] for name in changed)):
        try:
            return type(config)(**fields | {name: kept[name] for name in left})
        except Exception as error:  # noqa: BLE001 - of validators, setters and constructors
            failure = failure or error
    raise ValueError(f"{type(config).__name__} has no small form: {failure}")


def small_model(model_class: type[nn.Module], config: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model in evaluation mode with inputs that it takes, in float64 if it runs there.

    Args:
        model_class: of transformers.
        config: the configuration of the large model.

    Raises:
        ValueError: it cannot be made, or does not run with inputs that can be made here.
    """
    kind: Any = model_class
    small = small_config(config)
    for part in (small, *(getattr(small, name) for name in getattr(small, "sub_configs", {}))):
        if part is not None:
            part._attn_implementation = part._experts_implementation = "eager"
    failure: Exception | None = None
    with torch.random.fork_rng():
        for dtype in (torch.float64, torch.float32):
            try:
                with torch.device("meta"):
                    count = sum(p.numel() for p in kind(small).parameters())
                if count > MOST_PARAMETERS:
                    raise ValueError(f"{count:,} parameters in the small form")
                torch.manual_seed(0)
                model = kind(small).to(dtype).eval()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += torch.randn_like(parameter) * 0.05
            except Exception as error:
                raise ValueError(f"{kind.__name__} has no small form: {error}") from error
            for inputs in _inputs_for(model, dtype):
                try:
                    with torch.no_grad():
                        model(**inputs)
                except Exception as error:  # noqa: BLE001 - whatever the model raises
                    failure = failure or error
                else:
                    return model, inputs
    raise ValueError(f"a small {kind.__name__} does not run: {failure}")


def _inputs_for(model: Any, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Inputs that the model may take: its main one, then with others."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    made: dict[str, Tensor] = {}
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 16)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        made["pixel_values"] = torch.randn(2, channels, height, width, dtype=dtype)
    made["input_ids"] = torch.randint(3, VOCABULARY, (2, 7))
    made["input_values"] = torch.randn(2, 2000, dtype=dtype)
    with contextlib.suppress(AttributeError, TypeError):
        made["input_features"] = torch.randn(
            2, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype
        )
    main = made.get(model.main_input_name)
    if main is None:
        return
    inputs = {model.main_input_name: main}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 5))
    yield inputs
    for name in ("input_ids", "pixel_values"):
        if name in parameters:
            inputs = {**inputs, name: made[name]}
    yield inputs
