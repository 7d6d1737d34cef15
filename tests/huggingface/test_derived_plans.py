"""Plans derived from small copies of models that carry none."""

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.levels import in_gate
from support.ranks import run_threads
from support.sweeps import families

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface.derived_plans import derive
from pipekernels.huggingface.plans import Transformers
from pipekernels.huggingface.small_models import running_inputs, small_model
from pipekernels.tensor_parallel import plan_for
from pipekernels.tensor_parallel.plan.providers import ProvidedPlan

pytestmark = pytest.mark.slow


# The class, fields of its configuration, and kinds of some layers; of a name alone, of all of them.
DERIVED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "BertForMaskedLM": (
        {},
        {
            **{f"layer.*.attention.self.{name}": "column" for name in ("query", "key", "value")},
            "layer.*.attention.output.dense": "row",
            "layer.*.intermediate.dense": "column",
            "layer.*.output.dense": "row",
        },
    ),
    "GPT2LMHeadModel": (
        {},
        {"c_attn": "packed_column:3", "attn.c_proj": "row", "c_fc": "column", "mlp.c_proj": "row"},
    ),
    # Norms that all heads share are summed.
    "PersimmonForCausalLM": (
        {},
        {"query_key_value": "column"}
        | dict.fromkeys(("q_layernorm", "k_layernorm"), "replicated_with_grad_allreduce"),
    ),
    # Layers that few inputs reach: Bart's decoder by itself attends to what it is given, Git's also
    # looks at images.
    "BartForCausalLM": ({"decoder_layers": 2}, {"encoder_attn.out_proj": "row"}),
    "GitModel": (
        {"num_hidden_layers": 2, "vision_config": {"num_hidden_layers": 2}},
        {"image_encoder.vision_model.encoder.layers.*.mlp.fc2": "row"},
    ),
    # A bias of positions is divided by heads.
    "MPNetForMaskedLM": ({"num_hidden_layers": 2}, {"relative_attention_bias": "split_output"}),
    "UMT5EncoderModel": ({"num_layers": 2}, {"relative_attention_bias": "split_output"}),
    # Of state-space models all rows are listed: their mixers stay whole.
    "BambaForCausalLM": (
        {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
        {"o_proj": "row", "down_proj": "row"},
    ),
    "FalconH1ForCausalLM": ({"num_hidden_layers": 3}, {"o_proj": "row", "down_proj": "row"}),
    "NemotronHForCausalLM": (
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2},
        {"o_proj": "row", "down_proj": "row"},
    ),
    # Layers of a sequence have kinds of their own.
    "CTRLLMHeadModel": ({"n_layer": 2}, {"ffn.0": "column", "ffn.2": "row"}),
}


@pytest.mark.parametrize(
    "name", in_gate(["BertForMaskedLM", "GitModel", "FalconH1ForCausalLM"], DERIVED)
)
def test_kinds_of_layers(name: str) -> None:
    fields, expected = DERIVED[name]
    kind = getattr(transformers, name)
    kinds = derive(kind, kind.config_class(**fields)).kinds
    for layer, wanted in expected.items():
        found = {own for key, own in kinds.items() if key.endswith(layer)}
        assert found == {wanted}, layer
    if "o_proj" in expected:
        rows = {key.rpartition(".")[2] for key, own in kinds.items() if own == "row"}
        assert rows == expected.keys()


@pytest.mark.full
def test_layers_that_drop_paths_and_towers_of_a_depth_are_like_their_copies() -> None:
    depth = transformers.CohereCompassVisionConfig(depth=4)
    with torch.device("meta"):
        dropping = transformers.BeitModel(transformers.BeitConfig(num_hidden_layers=3))
        tower = transformers.CohereCompassVisionModel(depth)
    for model, count in ((dropping, 3), (tower, 4)):
        rows = [layer.count for layer in plan_for(model, 2).layers if layer.kind == "row"]
        assert rows[:2] == [count, count]


@pytest.mark.full
def test_the_outputs_of_what_needs_all_heads_are_gathered() -> None:
    """MPT's ALiBi has a slope for each head."""
    derived = derive(transformers.MptForCausalLM, transformers.MptConfig())
    assert {name.rpartition(".")[2] for name in derived.kinds} == {"up_proj", "down_proj"}
    ((layers, why),) = derived.refused.items()
    assert "Wqkv" in layers and "Error" in why
    assert derived.gathered == dict.fromkeys(layers.split(", ")[::-1], "column_gather_output")


def test_a_tower_that_the_carried_plan_leaves_out_has_its_own() -> None:
    plain, _ = small_model(*families.class_of("internvl"))
    inputs = running_inputs(plain.vision_tower, torch.float64)
    expected = plain.vision_tower(**inputs).last_hidden_state

    def body(comm: Communicator) -> tuple[list[str], float]:
        tower = tensor_parallelize(copy.deepcopy(plain), "auto", comm).vision_tower
        held = dict(tower.encoder.named_parameters())
        full = plain.vision_tower.encoder.named_parameters()
        whole = [key for key, p in full if p.dim() == 2 and p.shape == held[key].shape]
        return whole, (tower(**inputs).last_hidden_state - expected).abs().max().item()

    for whole, error in run_threads(2, body):
        assert not whole and error < 1e-12


def test_towers_of_fewer_heads_than_ranks_stay_whole() -> None:
    tower = ProvidedPlan({"*.o": "row"}, heads={"attention.o": (4, 2)})
    plan = ProvidedPlan({"q": "column"}, towers={"vision": tower})
    assert plan.with_towers(4) == ProvidedPlan(
        {"q": "column", "vision.*.o": "row"}, heads={"vision.attention.o": (4, 2)}
    )
    assert plan.with_towers(5) == ProvidedPlan({"q": "column"})


def test_a_large_model_gets_the_plan_of_its_small_copy() -> None:
    config = transformers.BartConfig(
        d_model=96, encoder_layers=3, decoder_layers=3, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=120, decoder_ffn_dim=120, vocab_size=100,
    )  # fmt: skip
    plan = plan_for(transformers.BartForConditionalGeneration(config), 3)
    rows = {(layer.name, layer.kind, layer.count) for layer in plan.layers}
    assert ("model.encoder.layers.*.self_attn.q_proj", "column", 3) in rows
    assert ("model.decoder.layers.*.encoder_attn.out_proj", "row", 3) in rows
    rows = plan_for(transformers.BartForConditionalGeneration(config), 4).layers
    kinds = {layer.name: (layer.kind, layer.shard) for layer in rows}
    assert kinds["model.encoder.layers.*.self_attn.q_proj"] == ("column/6/6", (2 * 16, 96))
    with pytest.raises(ValueError, match="has 6 heads .*which 7 ranks"):
        plan_for(transformers.BartForConditionalGeneration(config), 7)


@pytest.mark.full
def test_the_callers_state_does_not_matter_and_stays() -> None:
    class Other(transformers.BertForMaskedLM):  # Not known yet.
        pass

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    verbosity = transformers.logging.get_verbosity()
    with torch.inference_mode(), torch.device("meta"):
        derived = derive(Other, transformers.BertConfig())
    assert len(derived.kinds) == 6 and transformers.logging.get_verbosity() == verbosity
    assert torch.equal(torch.rand(2), expected)


def test_models_that_have_no_small_form_have_no_plan() -> None:
    class Broken(transformers.BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("never")

    config = transformers.BertConfig()
    with pytest.raises(ValueError, match="a small Broken does not run: never"):
        small_model(Broken, config)
    model, _ = small_model(transformers.BertModel, config)
    model.__class__ = Broken
    model.config.model_type = "broken"
    assert Transformers().plan_of(model) is None
