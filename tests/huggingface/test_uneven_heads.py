"""Models whose heads, or heads of keys, the number of ranks does not divide."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import assert_same_state
from support.levels import in_gate
from support.models import (
    SIZES,
    assert_close_to_largest,
    config_of,
    outputs_and_gradients,
    run_sharded,
    tokens,
    without_dropout,
)
from torch import nn

transformers = pytest.importorskip("transformers")

from pipekernels import Communicator
from pipekernels.huggingface import load_pretrained
from pipekernels.tensor_parallel import (
    full_state_dict,
    plan_for,
    tensor_unparallelize,
)

pytestmark = pytest.mark.slow

# Family, heads, heads of keys, ranks, and the heads of each rank.
CASES = [
    ("Llama", 9, 3, 2, [6, 3]),  # SmolLM.
    ("Qwen2", 14, 2, 3, [7, 4, 3]),  # Biases.
    ("Qwen3", 14, 2, 3, [7, 4, 3]),  # Norms of queries and keys.
    ("GptOss", 9, 3, 2, [6, 3]),  # Sinks, experts; the plan of the attention is derived.
    ("GptOss", 4, 2, 3, [2, 1, 1]),
    ("DeepseekV2", 5, 5, 2, [3, 2]),  # Latent attention.
    ("GPT2", 5, 5, 2, [3, 2]),  # Fused layers of Conv1D, by a table.
    ("GPTNeoX", 5, 5, 3, [2, 2, 1]),  # Queries, keys and values interleaved by head.
    ("Bloom", 5, 5, 2, [3, 2]),  # Biases by distance.
    ("StableLm", 6, 2, 3, [3, 2, 1]),  # Derived, with numbers of heads.
]
GATE = [CASES[i] for i in (0, 1, 3, 6, 8, 9)]


def model_of(family: str, heads: int, keys: int, dtype: torch.dtype = torch.float64) -> Any:
    fields = SIZES | {"num_attention_heads": heads, "hidden_size": 8 * heads}
    if heads != keys or family in ("Llama", "DeepseekV2"):
        fields["num_key_value_heads"] = keys
    if family in ("GptOss", "Qwen3"):
        fields["head_dim"] = 8
    if family == "GptOss":
        fields["num_local_experts"] = 4
    if family == "DeepseekV2":
        fields |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
        fields |= {"qk_nope_head_dim": 8, "first_k_dense_replace": 2}
    torch.manual_seed(0)
    config = config_of(family, **fields)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return without_dropout(model)


@pytest.mark.parametrize(("family", "heads", "keys", "ranks", "held"), in_gate(GATE, CASES))
def test_values_gradients_and_tokens_are_those_of_one_process(
    family: str, heads: int, keys: int, ranks: int, held: list[int], tmp_path: Path
) -> None:
    plain = model_of(family, heads, keys)
    ids = tokens(2, 9)
    generated = plain.generate(ids, max_new_tokens=5, do_sample=False)
    plain.save_pretrained(tmp_path / "plain")
    state = {key: value.clone() for key, value in plain.state_dict().items()}
    expected = outputs_and_gradients(copy.deepcopy(plain), ids)
    bound = 2**-21  # Some compute norms or weights of attention in float32.

    def body(model: Any, comm: Communicator) -> None:
        rows = [
            layer
            for name, layer in model.named_modules()
            if ("attn" in name or "attention" in name) and hasattr(layer, "input_is_parallel")
        ]
        assert len(rows) == 2
        for row in rows:
            features = row.weight.shape[not row.is_transposed]
            assert features * heads == row.in_features * held[comm.rank]
        assert_same_state(full_state_dict(model), state)
        assert model.generate(ids, max_new_tokens=5, do_sample=False).equal(generated)
        model.save_pretrained(tmp_path / "sharded")
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        load_pretrained(model, tmp_path / "plain")
        assert_same_state(full_state_dict(model), state)
        own = copy.deepcopy(model)
        assert_close_to_largest(outputs_and_gradients(own, ids), expected, bound)
        tensor_unparallelize(model)
        assert str(model) == str(plain)
        assert_close_to_largest(outputs_and_gradients(model, ids), expected, bound)

    run_sharded(plain, ranks, body)
    files = [tmp_path / folder / "model.safetensors" for folder in ("sharded", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_table_has_the_largest_rank() -> None:
    plan = plan_for(model_of("Qwen2", 14, 2), 3)
    layers = {layer.name.rpartition(".")[2]: layer for layer in plan.layers}
    assert [layers[f"{name}_proj"].kind for name in "qkvo"] == [
        "column/14/2", "column/2/2", "column/2/2", "row/14/2",
    ]  # fmt: skip
    assert layers["q_proj"].shard == (7 * 8, 14 * 8)
    assert layers["k_proj"].shard == (8, 14 * 8)
