"""What "auto" does where a carried plan is partial, or where the model needs more than a plan."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.models import GROUPED, SIZES, tokens
from support.ranks import run_threads
from torch import nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import full_state_dict

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def config_of(name: str, **fields: Any) -> Any:
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    return kind(**fields)


def build(config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.05
    return model


def outputs_and_gradients(model: nn.Module, **inputs: Any) -> list[torch.Tensor]:
    ids = tokens(2, 7)
    output = model(ids, labels=ids, **inputs)
    output.loss.backward()
    return [output.logits.detach(), output.loss.detach()]


CASES: dict[str, Any] = {
    "Apertus": lambda: config_of("Apertus", **GROUPED),  # Norms of heads, a trained activation.
    "Phi, norms": lambda: config_of("Phi", **GROUPED, qk_layernorm=True),
    "Gemma 4, dense": lambda: config_of(
        "Gemma4Text",
        **GROUPED,
        head_dim=8,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        hidden_size_per_layer_input=0,
        enable_moe_block=False,
    ),
    "GPT-2, cross-attention": lambda: config_of(
        "GPT2", **SIZES, n_positions=64, add_cross_attention=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    plain = build(CASES[name]())
    inputs = {}
    if "cross" in name:
        inputs["encoder_hidden_states"] = torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32).double()
    copies = [copy.deepcopy(plain) for _ in range(2)]
    expected = outputs_and_gradients(plain, **inputs)
    gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        for found, want in zip(outputs_and_gradients(model, **inputs), expected, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        for parameter in model.parameters():  # So that the full state is that of gradients.
            parameter.data = parameter.new_zeros(()) if parameter.grad is None else parameter.grad
        full = full_state_dict(model)
        for key, gradient in gradients.items():
            torch.testing.assert_close(full[key], gradient, rtol=1e-4, atol=1e-6, msg=key)

    run_threads(2, body)


def test_key_heads_are_counted_in_each_attention() -> None:
    """An encoder with four heads of keys, a decoder with two, on four ranks."""
    config = config_of(
        "T5Gemma",
        encoder=GROUPED | {"num_key_value_heads": 4, "head_dim": 8},
        decoder=GROUPED | {"head_dim": 8, "cross_attention_hidden_size": 32},
        vocab_size=61,
    )
    torch.manual_seed(0)
    plain = transformers.AutoModelForSeq2SeqLM.from_config(config).double().eval()
    copies = [copy.deepcopy(plain) for _ in range(4)]
    inputs = {"input_ids": tokens(2, 6), "decoder_input_ids": tokens(2, 5)}
    expected = plain(**inputs).logits

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-6)

    run_threads(4, body)


UNFIT: dict[str, Any] = {
    "norms of each head": lambda: (
        config_of("Cohere", **GROUPED, use_qk_norm=True),
        r"q_norm.weight., of shape \(4, 8\), is for all heads",
    ),
    "activation sparsity": lambda: (
        config_of(
            "Gemma3nText",
            **GROUPED | {"intermediate_size": [48] * 2},
            head_dim=8,
            vocab_size_per_layer_input=61,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
            altup_num_inputs=2,
            layer_types=["sliding_attention", "full_attention"],
            num_kv_shared_layers=0,
            activation_sparsity_pattern=[0.5] * 2,
        ),
        "mean and deviation.*activation_sparsity=0.5",
    ),
    "Doge": lambda: (config_of("Doge", **GROUPED), "no plan that is right"),
    "BigCode": lambda: (
        config_of(
            "GPTBigCode", **SIZES, n_positions=64, add_cross_attention=True, multi_query=False
        ),
        "no plan that is right.*cross-attention",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_plans_that_would_be_wrong_are_refused(name: str) -> None:
    config, message = UNFIT[name]()
    model = build(config)
    before = {key: id(module) for key, module in model.named_modules()}
    comms = Communicator.threads(2)
    with pytest.raises(ValueError, match=message):
        tensor_parallelize(model, "auto", comms[0])
    assert {key: id(module) for key, module in model.named_modules()} == before


class Softmax(nn.Module):
    """A softmax over all features between two layers that could be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(-1))


def test_a_check_finds_functions_that_need_all_features() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Softmax(), nn.Linear(8, 8)).double()
    copies = [copy.deepcopy(model) for _ in range(2)]
    x = torch.linspace(-2, 2, 24).view(3, 8).double()
    plan = {"1.up": "column", "1.down": "row"}

    def body(comm: Communicator) -> None:
        own = copies[comm.rank]
        with pytest.raises(ValueError, match=r"'1.down' is the first module whose output differs"):
            tensor_parallelize(own, plan, comm, check=x)
        torch.testing.assert_close(own(x), model(x))
        assert type(own[1].up) is nn.Linear and own.training
        assert tensor_parallelize(own, {"0": "column_gather_output"}, comm, check={"input": x})
        torch.testing.assert_close(own(x), model(x))

    run_threads(2, body)


def test_weights_of_other_classes_are_refused() -> None:
    class Quantized(nn.Parameter):
        pass

    comm = Communicator.threads(1)[0]
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = Quantized(torch.zeros(4, 4))
    with pytest.raises(TypeError, match=r"its weight is a .*Quantized.*first, then quantize"):
        tensor_parallelize(model, {"0": "column"}, comm)
    assert type(model[0]) is nn.Linear


def test_a_compiled_model_is_understood() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled = [torch.compile(copy.deepcopy(model), backend="eager") for _ in range(2)]
    x = torch.ones(2, 8)

    def body(comm: Communicator) -> None:
        own = tensor_parallelize(compiled[comm.rank], {"0": "column", "2": "row"}, comm)
        assert own is compiled[comm.rank]
        torch.testing.assert_close(own._orig_mod(x), model(x))

    run_threads(2, body)


def test_warnings() -> None:
    model = build(
        config_of("HunYuanDenseV1", **GROUPED, head_dim=8)
    )  # Carries a plan for its head.
    comm = Communicator.threads(2)[0]
    with pytest.warns(UserWarning, match=r"a rank of 2 holds 0\.9.*leaves most layers whole"):
        run_threads(2, lambda comm: tensor_parallelize(copy.deepcopy(model), "auto", comm))
    del comm
    sharded = build(config_of("Llama", **GROUPED, attn_implementation="eager"))
    sharded = tensor_parallelize(sharded, "auto", Communicator.threads(1)[0])
    with pytest.warns(UserWarning, match="this rank's heads only"):
        sharded(tokens(1, 3), output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(tokens(1, 3))


def test_prefix_tuning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(build(config_of("Llama", **GROUPED)), config)
    with pytest.raises(ValueError, match="prefix tuning.*use LoRA"):
        tensor_parallelize(model, "auto", Communicator.threads(1)[0])
