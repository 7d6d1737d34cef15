"""Plans derived from small copies of models that carry none."""

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.ranks import run_threads
from support.sweeps import families

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface.derive import derivation
from pipekernels.huggingface.derive.small_models import running_inputs, small_config, small_model
from pipekernels.huggingface.plans import Transformers, _heads
from pipekernels.tensor_parallel import plan_for

pytestmark = pytest.mark.slow


def derive(kind: Any, config: Any) -> derivation.Derivation:
    return derivation.derive(kind, config, _heads)


def test_the_plan_of_bert_is_what_one_would_write() -> None:
    derived = derive(transformers.BertForMaskedLM, transformers.BertConfig())
    layer = "bert.encoder.layer.*"
    assert derived.kinds == {
        **{f"{layer}.attention.self.{name}": "column" for name in ("query", "key", "value")},
        f"{layer}.attention.output.dense": "row",
        f"{layer}.intermediate.dense": "column",
        f"{layer}.output.dense": "row",
    }
    assert "num_attention_heads" in derived.divided[f"{layer}.attention.self"]


def test_fused_layers_are_found() -> None:
    derived = derive(transformers.GPT2LMHeadModel, transformers.GPT2Config())
    kinds = {name.rpartition("h.*.")[2]: kind for name, kind in derived.kinds.items()}
    assert kinds == {
        "attn.c_attn": "packed_column:3", "attn.c_proj": "row", "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    }  # fmt: skip
    assert derived.divided == {"transformer.h.*.attn": ["num_heads", "split_size"]}


def test_layers_that_few_inputs_reach_are_sharded() -> None:
    """Bart's decoder by itself attends to what it is given, Git's also looks at images."""
    derived = derive(transformers.BartForCausalLM, transformers.BartConfig(decoder_layers=2))
    assert derived.kinds["model.decoder.layers.*.encoder_attn.out_proj"] == "row"
    vision = {"num_hidden_layers": 2}
    config = transformers.GitConfig(num_hidden_layers=2, vision_config=vision)
    rows = {
        name for name, kind in derive(transformers.GitModel, config).kinds.items() if kind == "row"
    }
    assert "image_encoder.vision_model.encoder.layers.*.mlp.fc2" in rows


def test_attention_beside_state_spaces_is_sharded() -> None:
    """Attention and MLPs are sharded by blocks, the mixers between them are not."""
    config = transformers.FalconH1Config(num_hidden_layers=3)
    derived = derive(transformers.FalconH1ForCausalLM, config)
    rows = {key.rpartition(".")[2] for key, kind in derived.kinds.items() if kind == "row"}
    assert rows == {"o_proj", "down_proj"}


def test_linear_layers_of_a_sequence_have_kinds_of_their_own() -> None:
    kinds = derive(transformers.CTRLLMHeadModel, transformers.CTRLConfig(n_layer=2)).kinds
    assert [kinds[f"transformer.h.*.ffn.{i}"] for i in (0, 2)] == ["column", "row"]


def test_a_tower_that_the_carried_plan_leaves_out_has_its_own() -> None:
    plain = small_model(*families.class_of("internvl"))
    inputs = running_inputs(plain.vision_tower)
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
    kind, config = families.class_of("internvl")
    small = small_config(config)
    # The tower has 6.
    small.text_config.num_attention_heads = small.text_config.num_key_value_heads = 8
    model = kind(small)
    for world_size in (6, 7):
        names = [layer.name for layer in plan_for(model, world_size).layers]
        assert any("language_model" in name for name in names)
        assert any("vision_tower" in name for name in names) == (world_size == 6)


def test_a_large_model_gets_the_plan_of_its_small_copy() -> None:
    config = transformers.BartConfig(
        d_model=96, encoder_layers=3, decoder_layers=3, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=120, decoder_ffn_dim=120, vocab_size=100,
    )  # fmt: skip
    plan = plan_for(transformers.BartForConditionalGeneration(config), 3)
    rows = {(layer.name, layer.kind, layer.count) for layer in plan.layers}
    assert ("model.encoder.layers.*.self_attn.q_proj", "column", 3) in rows
    assert ("model.decoder.layers.*.encoder_attn.out_proj", "row", 3) in rows
    layers = plan_for(transformers.BartForConditionalGeneration(config), 4).layers
    kinds = {layer.name: (layer.kind, layer.shard) for layer in layers}
    assert kinds["model.encoder.layers.*.self_attn.q_proj"] == ("column/6/6", (2 * 16, 96))
    with pytest.raises(ValueError, match="has 6 heads .*which 7 ranks"):
        plan_for(transformers.BartForConditionalGeneration(config), 7)


@pytest.mark.full
def test_the_callers_state_does_not_matter_and_stays() -> None:
    Bert: Any = transformers.BertForMaskedLM

    class Other(Bert):  # Not known yet.
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
    Bert: Any = transformers.BertModel

    class Broken(Bert):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("never")

    config = transformers.BertConfig()
    with pytest.raises(ValueError, match="a small Broken does not run: never"):
        small_model(Broken, config)
    model = small_model(transformers.BertModel, config)
    model.__class__ = Broken
    model.config.model_type = "broken"
    assert Transformers().plan_of(model, 2) is None
