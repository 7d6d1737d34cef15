"""Models of transformers, sharded by the plans that they carry."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import assert_same_state, full_gradients
from support.levels import in_gate
from support.models import (
    DECODERS,
    ENCODERS,
    KINDS_OF_DECODERS,
    SPECIAL,
    inputs_of,
    model_of,
    run_sharded,
)
from torch import Tensor, nn

from pipekernels import Communicator
from pipekernels.tensor_parallel import full_state_dict

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def forward_backward(model: nn.Module, name: str) -> list[Tensor]:
    """The outputs of a forward, with a backward after it."""
    output = model(**inputs_of(name))
    tensors = [value for value in output.values() if isinstance(value, Tensor)]
    sum(tensor.square().mean() for tensor in tensors).backward()
    return [tensor.detach() for tensor in tensors]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Within a few units in the last place of float32, in which many models compute their norms, of
    the largest element: a sum in another order can round such a number to the next one."""
    for tensor, other in zip(found, expected, strict=True):
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(tensor, other, rtol=0, atol=2**-22 * largest + 1e-12)


@pytest.mark.parametrize(
    ("name", "world_size"),
    in_gate(
        [*((name, 2) for name in [*KINDS_OF_DECODERS, *ENCODERS, *SPECIAL]), ("Llama", 4)],
        [*itertools.product([*DECODERS, *ENCODERS], (2, 4)), *((name, 2) for name in SPECIAL)]
        + [("T5Gemma", 4)],
    ),
)
def test_values_and_gradients_are_those_of_one_process(name: str, world_size: int) -> None:
    plain = model_of(name)

    def body(model: nn.Module, _: Communicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        sharded = [module for module in model.modules() if hasattr(module, "full_state_dict")]
        assert len(sharded) >= 8
        return forward_backward(model, name), full_gradients(model)

    found = run_sharded(plain, world_size, body)
    expected = forward_backward(plain, name)
    for outputs, gradients in found:
        assert_close(outputs, expected)
        for key, parameter in plain.named_parameters():
            if parameter.grad is not None:
                assert_close([gradients[key]], [parameter.grad])


def test_a_saved_model_is_the_full_one(tmp_path: Path) -> None:
    plain = model_of("Llama, tied")

    def body(model: Any, comm: Communicator) -> None:
        with pytest.raises(ValueError, match="a shard; the full model's is"):
            model.save_pretrained(tmp_path / "shard", state_dict=model.state_dict())
        model.save_pretrained(tmp_path / f"given{comm.rank}", state_dict=full_state_dict(model))

    run_sharded(plain, 2, body)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "given0")
    assert_same_state(loaded.state_dict(), plain.state_dict())
    assert not (tmp_path / "given1" / "model.safetensors").exists()


def test_norms_between_the_layers_are_not_forgotten() -> None:
    """Qwen3's norms of queries and keys, with a plan by hand that names them or not."""
    plain = model_of("Qwen3")
    plan = {"*.[qkv]_proj": "colwise", "*.o_proj": "rowwise"}

    def named(model: nn.Module, _: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(model)
        forward_backward(model, "Qwen3")
        return {key: p.grad for key, p in model.named_parameters() if "_norm" in key}

    summed = plan | {"*.[qk]_norm": "replicated_with_grad_allreduce"}
    found = [run_sharded(plain, 2, named, each) for each in (plan, summed)]
    forward_backward(plain, "Qwen3")
    for gradients in itertools.chain(*found):
        for key, gradient in gradients.items():
            assert_close([gradient], [plain.get_parameter(key).grad])
