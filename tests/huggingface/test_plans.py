"""What "auto" does where a carried plan is partial, or where the model needs more than a plan."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.models import GROUPED, SIZES, config_of, tokens
from support.ranks import run_threads
from torch import nn

from pipekernels import Communicator, tensor_parallelize

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
