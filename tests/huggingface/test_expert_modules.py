"""Experts that are modules of linear layers, as models outside transformers have them."""

import copy
from typing import Any

import pytest
import torch
from support.levels import in_gate
from support.models import assert_close_to_largest, outputs_and_gradients
from support.ranks import run_threads
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import CausalLMOutput

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import RowParallelLinear, plan_for

pytestmark = pytest.mark.slow


class Config(transformers.PretrainedConfig):
    model_type = "experts_of_linear_layers"

    def __init__(self, **fields: Any) -> None:
        self.hidden_size, self.intermediate_size, self.vocab_size = 48, 96, 101
        self.num_hidden_layers, self.num_experts, self.num_experts_per_tok = 2, 8, 2
        super().__init__(**fields)


class Expert(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result


class Mixture(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                y = y.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return y.view_as(x)


class Model(transformers.PreTrainedModel):
    config_class = Config
    main_input_name = "input_ids"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Mixture(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(functional.layer_norm(x, x.shape[-1:]))
        return CausalLMOutput(logits=self.head(x))


@pytest.mark.parametrize("ranks", in_gate([2], [2, 4]))
def test_each_rank_holds_a_slice_of_every_expert(ranks: int) -> None:
    torch.manual_seed(0)
    model = Model(Config()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    ids = torch.randint(0, 101, (2, 7))
    rows = {(layer.name, layer.kind, layer.count) for layer in plan_for(model, ranks).layers}
    assert ("layers.*.experts.*.w2", "row", 16) in rows
    assert {kind for name, kind, _ in rows if "gate" in name} == set()
    expected = outputs_and_gradients(copy.deepcopy(model), ids)

    def body(comm: Communicator) -> None:
        own = tensor_parallelize(copy.deepcopy(model), "auto", comm)
        assert all(isinstance(expert.w2, RowParallelLinear) for expert in own.layers[1].experts)
        assert_close_to_largest(outputs_and_gradients(own, ids), expected, 1e-10)

    run_threads(ranks, body)
