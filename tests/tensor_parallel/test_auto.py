"""Models of transformers, sharded by the plans that they carry."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support.ranks import run_threads
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import full_state_dict

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGURATIONS = {
    "Llama": transformers.LlamaConfig(**GROUPED),
    "Llama, tied": transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "Qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "Mistral": transformers.MistralConfig(**GROUPED),
    "Gemma 2": transformers.Gemma2Config(**GROUPED, head_dim=8),
    "Phi-3": transformers.Phi3Config(**GROUPED),
    "GPT-NeoX": transformers.GPTNeoXConfig(**SIZES),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGURATIONS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():  # Norms begin as ones, biases as zeros.
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, Tensor]:
    ids = tokens(2, 9)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.loss.detach(), output.logits.detach()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_values_and_gradients_are_those_of_one_process(name: str) -> None:
    plain = model_of(name)
    copies = [copy.deepcopy(plain) for _ in range(2)]
    loss, logits = loss_and_gradients(plain)
    expected = {key: p.grad for key, p in plain.named_parameters()}

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        sharded_loss, sharded_logits = loss_and_gradients(model)
        torch.testing.assert_close(sharded_loss, loss, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(sharded_logits, logits, rtol=1e-10, atol=1e-10)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad  # So that the full state is that of gradients.
        gradients = full_state_dict(model)
        for key, gradient in expected.items():
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-9, atol=1e-10)

    run_threads(2, body)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_greedy_tokens_are_those_of_one_process(name: str) -> None:
    plain = model_of(name).eval()
    copies = [copy.deepcopy(plain) for _ in range(2)]
    prompt = tokens(2, 5)
    expected = plain.generate(prompt, max_new_tokens=12, do_sample=False)

    def body(comm: Communicator) -> Tensor:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        return model.generate(prompt, max_new_tokens=12, do_sample=False)

    for found in run_threads(2, body):
        assert torch.equal(found, expected)


def test_a_saved_model_is_the_full_one(tmp_path: Path) -> None:
    plain = model_of("Llama, tied")
    copies = [copy.deepcopy(plain) for _ in range(2)]

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        with pytest.raises(ValueError, match="a shard; the full model's is"):
            model.save_pretrained(tmp_path / "shard", state_dict=model.state_dict())
        model.save_pretrained(tmp_path / "full")
        model.save_pretrained(tmp_path / f"given{comm.rank}", state_dict=full_state_dict(model))

    run_threads(2, body)
    for folder in ("full", "given0"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        state = loaded.state_dict()
        assert state.keys() == plain.state_dict().keys()
        for key, value in plain.state_dict().items():
            assert torch.equal(state[key], value), key
    assert not (tmp_path / "given1" / "model.safetensors").exists()


def test_norms_between_the_layers_are_not_forgotten() -> None:
    """Qwen3's norms of queries and keys, with a plan by hand."""
    plain = model_of("Qwen3")
    plan = {"*.[qkv]_proj": "colwise", "*.o_proj": "rowwise"}
    copies = [copy.deepcopy(plain) for _ in range(4)]

    def forgotten(comm: Communicator) -> None:
        model = tensor_parallelize(copies[comm.rank], plan, comm)
        logits = model(tokens(1, 4)).logits
        with pytest.raises(
            RuntimeError, match=r"shape \(8,\) .* 'model.layers.1.self_attn.o_proj'"
        ):
            logits.sum().backward()

    def named(comm: Communicator) -> dict[str, Tensor]:
        model = copies[2 + comm.rank]
        norms = {"*.[qk]_norm": "replicated_with_grad_allreduce"}
        model = copy.deepcopy(tensor_parallelize(model, plan | norms, comm))
        loss_and_gradients(model)
        return {key: p.grad for key, p in model.named_parameters() if "_norm" in key}

    run_threads(2, forgotten)
    loss_and_gradients(plain)
    for gradients in run_threads(2, named):
        for key, gradient in gradients.items():
            expected = plain.get_parameter(key).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4), 2, "carries no plan"),
        (transformers.LlamaConfig(**GROUPED), 4, "num_key_value_heads=2, which 4 ranks"),
        (
            transformers.MixtralConfig(**GROUPED, num_local_experts=2),
            2,
            "kinds that are not supported.*packed_colwise",
        ),
    ],
    ids=["no plan", "few heads", "experts"],
)
def test_what_cannot_be_sharded_says_so_and_is_unchanged(
    config: object, world_size: int, message: str
) -> None:
    def body(comm: Communicator) -> None:
        model = transformers.AutoModelForCausalLM.from_config(config)
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match=message):
            tensor_parallelize(model, "auto", comm)
        assert dict(model.named_modules()) == before
        with pytest.raises(ValueError, match="must be a mapping or 'auto', got 'all'"):
            tensor_parallelize(model, "all", comm)

    run_threads(world_size, body)
