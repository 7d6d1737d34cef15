"""LoRA adapters of peft in sharded models."""

import copy
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import full_gradients
from support.levels import in_gate
from support.models import assert_close_to_largest, model_of, run_sharded, tokens
from support.ranks import on_ranks, run_threads
from torch import nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import (
    add_adapters,
    full_state_dict,
    tensor_unparallelize,
)
from pipekernels.tensor_parallel.sharded import sharded_layers

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow
TARGETS = {
    "Llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "Phi-3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "GPT-2": ["c_attn", "c_proj", "c_fc"],
}


def config_of(name: str, **options: Any) -> Any:
    return peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=TARGETS[name], task_type="CAUSAL_LM", **options
    )


def adapted(name: str, **options: Any) -> nn.Module:
    model = peft.get_peft_model(model_of(name), config_of(name, **options)).double()
    for key, parameter in model.named_parameters():
        if "lora_" in key:  # The second factor begins as zeros.
            nn.init.normal_(parameter, std=0.3)
    return model


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    values = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(2, 9), labels=tokens(2, 9)).loss
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.parametrize(
    ("name", "world_size"),
    in_gate([*((name, 2) for name in TARGETS), ("Llama", 4)], itertools.product(TARGETS, (2, 4))),
)
def test_training_follows_one_process_and_adapters_are_pefts_own(
    name: str, world_size: int, tmp_path: Path
) -> None:
    plain, whole = adapted(name), adapted(name)
    expected = losses(plain)
    assert expected[-1] < expected[0]
    trained = {key: p for key, p in plain.state_dict().items() if "lora_" in key}

    def body(model: Any, _: Communicator) -> None:
        assert losses(model) == pytest.approx(expected, rel=1e-6)
        state = full_state_dict(model)
        found = {key: state[key] for key in trained}
        torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-6)
        model.save_pretrained(tmp_path)
        tensor_unparallelize(model)
        assert losses(copy.deepcopy(model)) == pytest.approx(losses(copy.deepcopy(plain)), rel=1e-5)

    run_sharded(whole, world_size, body)
    loaded = peft.PeftModel.from_pretrained(model_of(name), tmp_path).double().state_dict()
    found = {key: p for key, p in loaded.items() if "lora_" in key}
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@on_ranks(2)
def test_adapters_added_to_a_sharded_model(comm: Communicator, name: str, tmp_path: Path) -> None:
    """They train as ones that were added to the whole model."""
    torch.manual_seed(3)
    plain = peft.get_peft_model(model_of(name).double(), config_of(name))
    torch.manual_seed(3)
    model = add_adapters(tensor_parallelize(model_of(name).double(), "auto", comm), config_of(name))
    trainable = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trainable == {key for key, p in plain.named_parameters() if p.requires_grad}
    assert losses(model) == pytest.approx(losses(plain), rel=1e-6)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model_of(name), tmp_path).double().state_dict()
    torch.testing.assert_close(loaded, plain.state_dict(), rtol=1e-4, atol=1e-6)
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens(2, 9)).logits, expected(tokens(2, 9)).logits)
    tensor_unparallelize(merged)
    torch.testing.assert_close(merged.state_dict(), expected.state_dict())


@on_ranks(2)
def test_adapters_that_need_whole_weights_are_refused(comm: Communicator) -> None:
    model = tensor_parallelize(model_of("Llama"), "auto", comm)
    before = dict(model.named_modules())
    with pytest.raises(TypeError, match="config must be a peft.LoraConfig, got IA3Config"):
        add_adapters(model, peft.IA3Config())
    tokens_of_lora = {"trainable_token_indices": [3]}
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}, tokens_of_lora):
        with pytest.raises(ValueError, match=r"read whole weights.*before tensor_parallelize"):
            add_adapters(model, config_of("Llama", **options))
    assert before == dict(model.named_modules())


@pytest.mark.parametrize(
    ("name", "how"),
    in_gate(
        [("Llama", "linear"), ("GPT-2", "load")],
        itertools.product(["Llama", "GPT-2"], ["linear", "cat", "add", "load"]),
    ),
)
@on_ranks(2)
def test_adapters_that_come_after_sharding(
    comm: Communicator, name: str, how: str, tmp_path: Path
) -> None:
    """As on the whole model. Ranks are in other states of the random number generator."""
    first = config_of(name, init_lora_weights=False)
    torch.manual_seed(4)
    whole = peft.get_peft_model(model_of(name).double(), first, "a")
    whole.add_adapter("b", first)
    saved = tmp_path / str(comm.rank)
    whole.save_pretrained(saved, selected_adapters=["b"])
    sharded = tensor_parallelize(copy.deepcopy(whole), "auto", comm)
    for model in (whole, sharded):
        torch.manual_seed(5 + (comm.rank if model is sharded else 0))
        if how == "add":
            model.add_adapter("c", config_of(name, init_lora_weights="gaussian"))
        elif how == "load":
            model.load_adapter(saved / "b", "c")
        else:
            model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "c", combination_type=how)
        model.set_adapter("c")
    assert losses(sharded) == pytest.approx(losses(whole), rel=1e-5)
    torch.testing.assert_close(full_state_dict(sharded), whole.state_dict(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="combination_type='svd' reads whole factors"):
        sharded.add_weighted_adapter(["a", "b"], [0.7, 0.3], "d")
    with pytest.raises(ValueError, match="read whole weights"):
        sharded.add_adapter("d", config_of(name, use_dora=True))
    assert "update_layer" not in {
        key for m in tensor_unparallelize(sharded).modules() for key in vars(m)
    }


# Of LoRA, around layers of every kind: how many layers are sharded in a model whose head is tied to
# its embedding, and in one where it is not; 0 if the model is refused.
WRAPPED: dict[str, tuple[Any, ...]] = {
    "plain": ({}, 20, 20),
    "biases": ({"lora_bias": True, "bias": "all"}, 20, 20),
    "head": ({"target_modules": ["lm_head"]}, 17, 17),
    "embedding": ({"target_modules": ["embed_tokens"]}, 14, 15),
    "head and embedding": ({"target_modules": ["lm_head", "embed_tokens"]}, 15, 16),
    "head trained whole": ({"modules_to_save": ["lm_head"]}, 21, 21),
    "embedding trained whole": ({"modules_to_save": ["embed_tokens"]}, 21, 21),
    "both trained whole": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, 22, 21,
    ),
    "projection trained whole": ({"modules_to_save": ["o_proj"]}, 22, 22),
    "MLP trained whole": ({"modules_to_save": ["mlp"], "target_modules": ["k_proj"]}, 12, 12),
    "attention trained whole": ({"modules_to_save": ["self_attn"], "target_modules": ["up_proj"]},)
    + (0, 0),
    "norm trained whole": ({"modules_to_save": ["norm"]}, 20, 20),
    "tokens": ({"trainable_token_indices": [3, 4]}, 18, 19),
    "DoRA of the head": ({"use_dora": True, "target_modules": ["lm_head"]}, 14, 15),
    "DoRA": ({"use_dora": True}, 0, 0),
    "activated LoRA": ({"alora_invocation_tokens": [3]}, 0, 0),
    "parameter": ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, 0, 0),
}  # fmt: skip


def check_wrapped(plain: Any, sharded: int | None) -> None:
    """The model is refused, in words about peft's wrapper, or gives the outputs and gradients of
    one process with ``sharded`` layers, if that is given, of which some are sharded."""
    for key, parameter in plain.named_parameters():
        if parameter.requires_grad and "lora" in key:
            nn.init.normal_(parameter, std=0.3)
    options = {"labels": tokens(2, 9)}
    if "task_ids" in inspect.signature(plain.forward).parameters:
        options["task_ids"] = torch.tensor([0, 0])

    def results(model: Any) -> dict[str, torch.Tensor]:
        output = model(input_ids=tokens(2, 9), **options).logits
        output.square().mean().backward()
        return {"output": output.detach(), **full_gradients(model)}

    expected = results(copy.deepcopy(plain))
    bound = 2**-21  # Norms are computed in float32.

    def body(model: Any, comm: Communicator) -> None:
        assert len(sharded_layers(model)) == (sharded or len(sharded_layers(model))) > 0
        assert_close_to_largest(results(copy.deepcopy(model)), expected, bound)
        assert_close_to_largest(results(tensor_unparallelize(model)), expected, bound)

    if sharded == 0:
        with pytest.raises((TypeError, ValueError), match="peft's|is not like the small copy"):
            run_sharded(plain, 2, body)
    else:
        run_sharded(plain, 2, body)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", WRAPPED)
def test_wrappers_of_every_layer(case: str, tied: bool) -> None:
    options, *counts = WRAPPED[case]
    options = {
        "r": 3,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    } | options
    model = peft.get_peft_model(
        model_of("Llama, tied" if tied else "Llama"), peft.LoraConfig(**options)
    )
    check_wrapped(model.double(), counts[not tied])


# Options of peft's other adapters, where defaults do not fit a small model.
KINDS = {
    "ADALORA": {"total_step": 9},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1, "target_modules": None},
    "C3A": {"block_size": 8},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["norm"]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "POLY": {"n_tasks": 2},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 4]},
    "VBLORA": {"vector_length": 8},
    "WAVEFT": {"n_frequency": 20},
}
WORKS = {
    "ADAPTION_PROMPT", "CPT", "LN_TUNING", "LORA", "MULTITASK_PROMPT_TUNING", "PROMPT_TUNING",
    "P_TUNING", "TRAINABLE_TOKENS",
}  # fmt: skip
# They need scikit-learn, a compiler for CUDA, a second model, and files of other adapters.
UNTRIED = {"ADAMSS", "BOFT", "SHADOW", "XLORA"}


@pytest.mark.parametrize(
    "kind",
    in_gate(
        ["IA3", "PREFIX_TUNING", "PROMPT_TUNING", "VERA"],
        sorted({str(kind.value) for kind in peft.PeftType} - UNTRIED),
    ),
)
def test_every_kind_of_adapter(kind: str) -> None:
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    common = {"target_modules": ["q_proj", "down_proj"], "num_virtual_tokens": 3}
    options = {key: v for key, v in common.items() if key in inspect.signature(config).parameters}
    options |= {"task_type": "CAUSAL_LM"} | KINDS.get(kind, {})
    model = peft.get_peft_model(model_of("Llama").float(), config(**options)).double()
    check_wrapped(model, None if kind in WORKS else 0)


def test_what_cannot_be_sharded_is_refused() -> None:
    models = [adapted("Llama"), adapted("Llama")]
    torch.manual_seed(9)
    nn.init.normal_(models[1].get_parameter(
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    ))  # fmt: skip

    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="up_proj.lora_A.default.weight' on rank 1 is not"):
            tensor_parallelize(models[comm.rank], "auto", comm)

    run_threads(2, body)
