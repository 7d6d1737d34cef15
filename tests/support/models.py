"""Small models of transformers with random weights, in float64."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from support.checks import full_gradients
from support.ranks import run_threads

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
DECODERS = {
    "Llama": transformers.LlamaConfig(**GROUPED),
    "Llama, tied": transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "Qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "Mistral": transformers.MistralConfig(**GROUPED),
    "Gemma 2": transformers.Gemma2Config(**GROUPED, head_dim=8),
    "Phi-3": transformers.Phi3Config(**GROUPED),
    "GPT-NeoX": transformers.GPTNeoXConfig(**SIZES),
    "GPT-2": transformers.GPT2Config(**SIZES, n_positions=128),
    "GPT-BigCode": transformers.GPTBigCodeConfig(**SIZES, n_positions=128),
    "Bloom": transformers.BloomConfig(**SIZES),
    "Granite": transformers.GraniteConfig(**GROUPED),
    "OLMo 2": transformers.Olmo2Config(**GROUPED),
    "StarCoder 2": transformers.Starcoder2Config(**GROUPED),
    "OPT": transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
}
# One for each kind of attention and of plan. The others differ from these in positions, biases,
# scales, or in a window that is longer than the inputs.
KINDS_OF_DECODERS = [
    "Llama",  # Grouped queries.
    "Qwen3",  # Norms of each head's queries and keys.
    "OLMo 2",  # Norms of all heads' queries and keys.
    "Gemma 2",  # Windows and whole sequences by turns.
    "Phi-3",  # Queries, keys and values in one layer, one after another.
    "GPT-NeoX",  # The same, interleaved by head.
    "GPT-2",  # Conv1D.
    "GPT-BigCode",  # One head of keys and values.
    "Bloom",  # Biases by distance.
]
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
ENCODERS = {
    "BERT": transformers.BertConfig(**SIZES),
    "RoBERTa": transformers.RobertaConfig(**SIZES),
    "DistilBERT": transformers.DistilBertConfig(
        dim=32, n_heads=4, n_layers=2, hidden_dim=48, vocab_size=61
    ),
    "T5": transformers.T5Config(**T5),
    "T5, gated": transformers.T5Config(**T5, feed_forward_proj="gated-gelu"),
    "ViT": transformers.ViTConfig(**SIZES, image_size=8, patch_size=4),
    "Whisper": transformers.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=61,
        num_mel_bins=4, max_source_positions=8, pad_token_id=0, decoder_start_token_id=1,
    ),
}  # fmt: skip
# What plans leave out, or models need beside a plan; by class and fields of the configuration.
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Apertus": ("Apertus", GROUPED),  # Norms of heads, a trained activation.
    "Phi, norms": ("Phi", GROUPED | {"qk_layernorm": True}),
    "Gemma 4, dense": (
        "Gemma4Text",
        GROUPED
        | {
            "head_dim": 8,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
        },
    ),
    "GPT-2, cross-attention": ("GPT2", SIZES | {"n_positions": 64, "add_cross_attention": True}),
    "T5Gemma": (  # Four heads of keys in the encoder, two in the decoder.
        "T5Gemma",
        {
            "encoder": GROUPED | {"num_key_value_heads": 4, "head_dim": 8},
            "decoder": GROUPED | {"head_dim": 8, "cross_attention_hidden_size": 32},
            "vocab_size": 61,
        },
    ),
}
INPUTS = {
    "GPT-2, cross-attention": lambda: {
        "input_ids": tokens(2, 7),
        "encoder_hidden_states": torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32).double(),
    },
    "T5": lambda: {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 5)},
    "ViT": lambda: {"pixel_values": torch.ones(2, 3, 8, 8, dtype=torch.float64)},
    "Whisper": lambda: {
        "input_features": torch.ones(2, 4, 16, dtype=torch.float64),
        "decoder_input_ids": tokens(2, 5),
    },
}
INPUTS["T5, gated"] = INPUTS["T5Gemma"] = INPUTS["T5"]


def inputs_of(name: str) -> dict[str, Tensor]:
    return INPUTS.get(name, lambda: {"input_ids": tokens(2, 9)})()


def config_of(name: str, **fields: Any) -> Any:
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    return kind(**fields)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name in SPECIAL:
        kind, fields = SPECIAL[name]
        config = config_of(kind, **copy.deepcopy(fields))
    else:
        config = copy.deepcopy((DECODERS | ENCODERS)[name])
    is_causal = name not in ENCODERS and name != "T5Gemma"
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    model = auto.from_config(config, attn_implementation="eager").double()
    for parameter in model.parameters():  # Norms begin as ones, biases as zeros.
        nn.init.normal_(parameter, std=0.3)
    return without_dropout(model)


def without_dropout(model: Any) -> Any:
    """Ranks that are threads share torch's generator."""
    for module in model.modules():
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def outputs_and_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The logits, and the gradients of the full parameters, which they replace."""
    output = model(input_ids=ids).logits
    output.square().mean().backward()
    return {"output": output.detach(), **full_gradients(model)}


def assert_close_to_largest(
    found: dict[str, Tensor], expected: dict[str, Tensor], bound: float
) -> None:
    """Errors are at most ``bound``, relative to the largest element of a tensor."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        largest = value.abs().max().clamp_min(1e-3)
        assert (found[key] - value).abs().max() / largest <= bound, key


def run_sharded(
    plain: nn.Module,
    world_size: int,
    body: Callable[[Any, Communicator], Any],
    plan: dict[str, str] | Literal["auto"] = "auto",
) -> list[Any]:
    """Run ``body(model, comm)`` on ranks that are threads, with copies of ``plain`` sharded by
    ``plan``; returns the results in rank order."""
    copies = [copy.deepcopy(plain) for _ in range(world_size)]
    return run_threads(
        world_size, lambda comm: body(tensor_parallelize(copies[comm.rank], plan, comm), comm)
    )


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(1))
