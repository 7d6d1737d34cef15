"""What "auto" does where a carried plan is partial, or where the model needs more than a plan."""

from datetime import date
from typing import Any

import pytest
import torch
from support.models import GROUPED, config_of
from support.sweeps import families
from torch import nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import plan_for

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def build(config: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


UNFIT: dict[str, Any] = {
    "norms of each head": lambda: (
        config_of("Cohere", **GROUPED, use_qk_norm=True),
        r"q_norm.weight., of shape \(4, 8\), is for all heads",
    ),
    "activation sparsity": lambda: (
        config_of(
            "Gemma3nText", **GROUPED | {"intermediate_size": [48] * 2}, head_dim=8,
            vocab_size_per_layer_input=61, hidden_size_per_layer_input=8, laurel_rank=8,
            altup_num_inputs=2, layer_types=["sliding_attention", "full_attention"],
            num_kv_shared_layers=0, activation_sparsity_pattern=[0.5] * 2,
        ),
        "mean and deviation.*activation_sparsity=0.5",
    ),
    "Doge": lambda: (config_of("Doge", **GROUPED), "no plan that is right"),
    "CodeGen": lambda: (config_of("CodeGen", n_embd=64, n_layer=1, n_head=4), "carries no plan"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_plans_that_would_be_wrong_are_refused(name: str) -> None:
    config, message = UNFIT[name]()
    model = build(config)
    before = dict(model.named_modules())
    comm, _ = Communicator.threads(2)
    with pytest.raises(ValueError, match=message):
        tensor_parallelize(model, "auto", comm)
    assert dict(model.named_modules()) == before


def test_layers_may_have_different_numbers_of_heads() -> None:
    config = config_of(
        "Laguna", **GROUPED, head_dim=8, num_attention_heads_per_layer=[4, 6],
        mlp_layer_types=["dense", "dense"], layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = build(config)
    shapes = {layer.name: layer.shard for layer in plan_for(model, 2).layers}
    assert shapes["model.layers.0.self_attn.q_proj"][0] == 2 * 8
    assert shapes["model.layers.1.self_attn.q_proj"][0] == 3 * 8
    with pytest.raises(ValueError, match=r"layers.0.self_attn.o_proj' has 4 heads .* 5 ranks"):
        plan_for(model, 5)


@pytest.mark.full
@pytest.mark.processes  # MRA, RWKV and YOSO ask for a compiler.
@pytest.mark.parametrize("part", range(2))
def test_families_are_sharded_right_or_refused(part: int) -> None:
    """An eighth of transformers, as docs/families.md lists it; the next day another one. A run of
    ``python -m support.sweeps.families`` looks at all."""
    names = families.names()[date.today().toordinal() % 8 :: 8][part::2]
    found = [families.look_at(name) for name in names]
    assert not [finding for finding in found if finding.state in ("differs", "fails")]
    if transformers.__version__ in families.PAGE.read_text():
        listed = families.on_page(families.PAGE.read_text())
        equal = {each.family for each in listed if each.state == "equal"}
        now = {
            state: {f.family for f in found if f.state == state} for state in ("equal", "refused")
        }
        wrong = now["equal"] - equal | now["refused"] & equal
        assert not wrong, f"docs/families.md is not that of this program; run it: {wrong}"
