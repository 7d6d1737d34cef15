"""Inputs of small transformers models: tokens, images and sound, in the usual layouts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

VOCABULARY, TOKENS, FRAMES, PATCHES = 61, 7, 128, 16


def inputs_for(model: Any, dtype: torch.dtype, length: int = TOKENS) -> Iterator[dict[str, Tensor]]:
    """Inputs that the model may take, texts of ``length`` tokens. In each layout: its main one,
    then with what it requires and tokens, images or states, then with all that are known here."""
    parameters = inspect.signature(model.forward).parameters
    main = model.main_input_name
    names = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] or [main]
    main = main if main in names else names[0]  # Some name another.
    required = [n for n, p in parameters.items() if n in names and p.default is p.empty]
    seen: set[tuple[Any, ...]] = set()
    for made in _layouts(model.config, dtype, length):
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
    hidden = sizes.get("hidden_size") or 32

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
    """The fields of a configuration, and those of its parts that it has not itself."""
    fields: dict[str, Any] = {}
    for _, inner in sorted(inner_configs(config).items()):
        fields |= _sizes(inner)
    return fields | {name: value for name, value in vars(config).items() if value is not None}


def _first(sizes: dict[str, Any], names: str) -> int | None:
    return next((n for name in names.split() if type(n := sizes.get(name)) is int), None)
