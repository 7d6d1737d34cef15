"""Attention with sinks, a parameter for each head, in float64 against one process."""

import copy

import pytest
import torch
from support.levels import in_gate
from support.models import assert_close_to_largest, outputs_and_gradients
from support.ranks import run_threads

transformers = pytest.importorskip("transformers")

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface.small_models import small_model
from pipekernels.tensor_parallel import RowParallelLinear, plan_for

FAMILIES = {
    "GptOss": (transformers.GptOssForCausalLM, transformers.GptOssConfig),  # Has no plan for them.
    "GraniteSWA": (transformers.GraniteSWAForCausalLM, transformers.GraniteSWAConfig),
    "MiMoV2Flash": (transformers.MiMoV2FlashForCausalLM, transformers.MiMoV2FlashConfig),
}
# Of the largest magnitude: sums in another order. Some compute weights of attention in float32.
BOUNDS = {"GptOss": 1e-10}
FLOAT32_BOUND = 4 * torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", in_gate([4], [2, 4]))
def test_sharded_heads_have_their_own_sinks(family: str, ranks: int) -> None:
    kind, config = FAMILIES[family]
    model, inputs = small_model(kind, config())
    ids = inputs["input_ids"]
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    rows = {layer.name: layer.kind for layer in plan_for(model, ranks).layers}
    assert any(kind.startswith("split_parameters") for kind in rows.values())
    expected = outputs_and_gradients(copy.deepcopy(model), ids)

    def body(comm: Communicator) -> None:
        own = tensor_parallelize(copy.deepcopy(model), "auto", comm)
        attention = own.model.layers[0].self_attn
        assert isinstance(attention.o_proj, RowParallelLinear)
        assert own.generate(ids, max_new_tokens=6, do_sample=False).equal(tokens)
        bound = BOUNDS.get(family, FLOAT32_BOUND)
        assert_close_to_largest(outputs_and_gradients(own, ids), expected, bound)

    run_threads(ranks, body)
