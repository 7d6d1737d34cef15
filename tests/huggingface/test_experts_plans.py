"""Mixtures of experts of transformers: plans, loading, saving, and what plan_for says of them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import assert_same_state
from support.levels import in_gate
from support.ranks import run_threads

transformers = pytest.importorskip("transformers")

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface import load_pretrained
from pipekernels.huggingface.derive.small_models import small_model
from pipekernels.tensor_parallel import (
    clip_grad_norm_,
    full_state_dict,
    plan_for,
    tensor_unparallelize,
)
from pipekernels.tensor_parallel.experts import ParallelExperts

pytestmark = pytest.mark.slow
EXPERT_PARALLEL = {"*.experts": "expert_parallel"}


def model_of(family: str) -> Any:
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config" if family != "Llama4" else "Llama4TextConfig")
    return small_model(kind, config(num_hidden_layers=4))


def losses(model: Any, ids: torch.Tensor) -> list[float]:
    """Of ten training steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # Small, lest rounding errors grow.
    is_mixtral = isinstance(model, transformers.MixtralForCausalLM)
    auxiliary = {"output_router_logits": True} if is_mixtral else {}
    found = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, **auxiliary).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3", "Glm4MoeLite", "GptOss"])
@pytest.mark.parametrize("plan", ["auto", "expert parallel"])
@pytest.mark.parametrize("ranks", in_gate([2], [2, 4]))
def test_training_follows_the_losses_of_one_process(family: str, plan: Any, ranks: int) -> None:
    full = model_of(family)
    ids = torch.randint(3, 61, (2, 7))
    expected = losses(copy.deepcopy(full).train(), ids)
    tokens = full.generate(ids, max_new_tokens=5, do_sample=False)

    def body(comm: Communicator) -> None:
        model = copy.deepcopy(full)
        tensor_parallelize(model, "auto" if plan == "auto" else EXPERT_PARALLEL, comm)
        assert any(isinstance(module, ParallelExperts) for module in model.modules())
        assert model.generate(ids, max_new_tokens=5, do_sample=False).equal(tokens)
        bound = 16 * torch.finfo(torch.float32).eps  # In which transformers computes the loss.
        torch.testing.assert_close(losses(model.train(), ids), expected, rtol=bound, atol=0)
        tensor_unparallelize(model)
        assert full_state_dict(model).keys() == full.state_dict().keys()

    run_threads(ranks, body)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("layout", ["fused", "per expert"])
@pytest.mark.parametrize("plan", ["auto", "expert parallel"])
def test_files_are_read_slice_by_slice(family: str, layout: str, plan: str, tmp_path: Path) -> None:
    full = model_of(family).float()
    if layout == "fused":
        import safetensors.torch

        state = {key: value.contiguous() for key, value in full.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    else:
        full.save_pretrained(tmp_path)  # As checkpoints of this family are: a file per expert.

    def body(comm: Communicator) -> None:
        model = copy.deepcopy(full)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        tensor_parallelize(model, "auto" if plan == "auto" else EXPERT_PARALLEL, comm)
        load_pretrained(model, tmp_path)
        assert_same_state(full_state_dict(model), full.state_dict())

    run_threads(2, body)


def test_a_plan_shows_experts_of_both_kinds() -> None:
    full = model_of("Mixtral")
    inside, expert_parallel = plan_for(full, 2), plan_for(full, 2, EXPERT_PARALLEL)
    (layer,) = (layer for layer in inside.layers if layer.kind == "experts")
    assert (layer.shape, layer.shard) == ((6, 48, 26), (6, 48, 13))
    assert layer.forward == "all-reduce 48"
    (layer,) = expert_parallel.layers
    assert (layer.shape, layer.shard, layer.count) == ((6, 48, 26), (3, 48, 26), 4)
    experts = sum(p.numel() for name, p in full.named_parameters() if "experts" in name)
    assert expert_parallel.full_parameters - expert_parallel.rank_parameters == experts // 2
    embedded = full.get_input_embeddings().weight.nbytes
    # Two of six experts are chosen, and half of each parameter's 8 bytes are on this rank.
    assert expert_parallel.rank_bytes - expert_parallel.token_bytes == 8 * experts // 3 + embedded


def test_what_experts_do_not_support_is_refused() -> None:
    full = model_of("Mixtral")
    llama = model_of("Llama4")

    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="invariant=True does not support experts"):
            tensor_parallelize(copy.deepcopy(full), EXPERT_PARALLEL, comm, invariant=True)
        with pytest.raises(ValueError, match="sorted by experts, and cannot be sharded that way"):
            tensor_parallelize(copy.deepcopy(llama), EXPERT_PARALLEL, comm)
        with pytest.raises(TypeError, match="only a module of stacked experts can be made 'exp"):
            tensor_parallelize(copy.deepcopy(full), {"*.gate": "experts"}, comm)

    run_threads(2, body)
