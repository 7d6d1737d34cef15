"""Attention with sinks, a parameter for each head, in float64 against one process."""

import copy
from typing import Any

import pytest
import torch
from support.levels import in_gate
from support.ranks import run_threads
from torch import Tensor

transformers = pytest.importorskip("transformers")

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface.small_models import small_model
from pipekernels.tensor_parallel import RowParallelLinear, full_state_dict, plan_for

FAMILIES = {
    "GptOss": (transformers.GptOssForCausalLM, transformers.GptOssConfig),  # Has no plan for them.
    "GraniteSWA": (transformers.GraniteSWAForCausalLM, transformers.GraniteSWAConfig),
    "MiMoV2Flash": (transformers.MiMoV2FlashForCausalLM, transformers.MiMoV2FlashConfig),
}
# Of the largest magnitude: sums in another order. Some compute weights of attention in float32.
BOUNDS = {"GptOss": 1e-10}
FLOAT32_BOUND = 4 * torch.finfo(torch.float32).eps


def outputs_and_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    output = model(input_ids=ids).logits
    output.square().mean().backward()
    for parameter in model.parameters():  # So that the full state is that of gradients.
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    return {"output": output.detach(), **full_state_dict(model)}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", in_gate([4], [2, 4]))
def test_sharded_heads_have_their_own_sinks(family: str, ranks: int) -> None:
    kind, config = FAMILIES[family]
    model, inputs = small_model(kind, config())
    ids = inputs["input_ids"]
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    rows = {layer.name: layer.kind for layer in plan_for(model, ranks).layers}
    assert "split_parameters" in rows.values()
    expected = outputs_and_gradients(copy.deepcopy(model), ids)

    def body(comm: Communicator) -> None:
        own = tensor_parallelize(copy.deepcopy(model), "auto", comm)
        attention = own.model.layers[0].self_attn
        assert isinstance(attention.o_proj, RowParallelLinear)
        assert own.generate(ids, max_new_tokens=6, do_sample=False).equal(tokens)
        found = outputs_and_gradients(own, ids)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            largest = value.abs().max().clamp_min(1e-3)
            error = (found[key] - value).abs().max() / largest
            assert error <= BOUNDS.get(family, FLOAT32_BOUND), key

    run_threads(ranks, body)
