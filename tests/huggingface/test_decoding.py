"""``generate`` with compiled decoder layers."""

import copy
from typing import Any

import pytest
import torch
import transformers
from support.levels import in_gate
from support.models import DECODERS, ENCODERS, GROUPED, config_of, model_of, run_sharded, tokens
from support.ranks import run_processes
from support.reference import gamma
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface import compile_decoding, decoding
from pipekernels.tensor_parallel import quantize_weights, tensor_unparallelize

pytestmark = [pytest.mark.slow, pytest.mark.compile]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Counts programs, which run as they were traced."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(decoding, "inductor", lambda graph, inputs, _: counter(graph, inputs))
    monkeypatch.setattr(decoding, "_KEYS", 8)  # Texts of tests are short.
    return counter


@pytest.mark.parametrize(
    "name", in_gate(["Llama", "Gemma 2", "GPT-NeoX", "GPT-2", "Bloom"], list(DECODERS))
)
def test_tokens_are_those_of_the_eager_model(name: str, counter: CompileCounter) -> None:
    model = model_of(name).eval()
    prompt = tokens(2, 5)
    padded = torch.ones_like(prompt)
    padded[0, :2] = 0
    calls: list[dict[str, Any]] = [
        {"inputs": prompt},
        {"inputs": prompt[:, :3], "max_new_tokens": 30},
        {"inputs": prompt, "attention_mask": padded},
        {"inputs": prompt, "num_beams": 3},
        {"inputs": prompt.repeat(4, 1)},
        {"inputs": prompt[:1]},
    ]
    expected = [model.generate(**GREEDY | call) for call in calls]
    compiled = compile_decoding(copy.deepcopy(model), max_length=64)
    assert compile_decoding(compiled, max_length=64) is compiled
    for call, each in zip(calls, expected, strict=True):
        assert torch.equal(compiled.generate(**GREEDY | call), each)
    assert counter.frame_count > 0
    torch.manual_seed(0)
    sampled = model.generate(prompt, max_new_tokens=9, do_sample=True)
    torch.manual_seed(0)
    assert torch.equal(compiled.generate(prompt, max_new_tokens=9, do_sample=True), sampled)


def test_layers_share_a_program_that_serves_texts_of_all_lengths(counter: CompileCounter) -> None:
    model: Any = compile_decoding(model_of("Llama").eval(), max_length=64)
    assert len(model.model.layers) == 2
    for length in 5, 3, 20:
        model.generate(tokens(2, length), **GREEDY)
    assert counter.frame_count == 1
    for batch in 3, 4, 7:
        model.generate(tokens(batch, 5), **GREEDY)
    assert counter.frame_count == 2


class Looped(nn.Module):
    """Runs a layer twice per token, each with a place of its own in the cache."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer
        self.attention_type = "full_attention"

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for index in 0, 1:
            self.layer.self_attn.layer_idx = index
            x = self.layer(x, **kwargs)
        return x


@pytest.mark.parametrize("length", [1, 5])
def test_a_layer_that_is_called_twice_per_token_is_not_compiled(
    length: int, counter: CompileCounter
) -> None:
    plain: Any = model_of("Llama").eval()
    plain.model.layers = nn.ModuleList([Looped(plain.model.layers[0])])
    model: Any = compile_decoding(copy.deepcopy(plain), max_length=64)
    expected = plain.generate(tokens(2, length), **GREEDY)
    assert torch.equal(model.generate(tokens(2, length), **GREEDY), expected)
    assert counter.frame_count == 0


def test_flags_apply_to_their_call_alone(counter: CompileCounter) -> None:
    plain: Any = model_of("Llama").eval()
    model: Any = compile_decoding(copy.deepcopy(plain), max_length=64)
    options: list[dict[str, Any]] = [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
        {"past_key_values": lambda: transformers.DynamicCache(config=plain.config)},
        {"past_key_values": lambda: transformers.StaticCache(plain.config, 20)},
        {"cache_implementation": "static"},
    ]
    for option in ({}, *options):
        found, expected = (
            each.generate(
                tokens(1, 5),
                return_dict_in_generate=True,
                **GREEDY,
                **{key: value() if callable(value) else value for key, value in option.items()},
            )
            for each in (model, plain)
        )
        assert torch.equal(found.sequences, expected.sequences)
        bound = gamma(2 * 8 * 48, 2**-24)  # As in test_changed_decoders.py.
        torch.testing.assert_close(
            found.hidden_states, expected.hidden_states, rtol=bound, atol=bound
        )


def test_what_is_no_step_of_decoding_runs_as_before(counter: CompileCounter) -> None:
    plain = model_of("Llama")
    model = compile_decoding(copy.deepcopy(plain), max_length=64)
    x = tokens(2, 1)
    model(x).logits.sum().backward()
    plain(x).logits.sum().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert counter.frame_count == 0


@pytest.mark.parametrize("int8", [False, True])
def test_sharded_layers(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.Graph] = []

    def compiled(graph: torch.fx.GraphModule, *_: Any) -> Any:
        graphs.append(graph.graph)
        return graph.forward

    monkeypatch.setattr(decoding, "inductor", compiled)

    def body(model: Any, comm: Communicator) -> None:
        before = {name: vars(module).get("forward") for name, module in model.named_modules()}
        if int8:
            quantize_weights(model)
        expected = model.generate(tokens(2, 5), **GREEDY)
        compile_decoding(model, max_length=64)
        assert torch.equal(model.generate(tokens(2, 5), **GREEDY), expected)
        operators = {"linear": 2, "row_linear": 2}  # q, k, v are one product, as are gate, up.
        for name, count in operators.items():
            operator = getattr(torch.ops.pipekernels, name)
            assert len(graphs[0].find_nodes(op="call_function", target=operator)) == count
        attention = model.model.layers[0].self_attn
        query, key = attention.q_proj.weight, attention.k_proj.weight
        assert key.data_ptr() == query.data_ptr() + query.nbytes
        assert query.untyped_storage().nbytes() == query.nbytes
        if not int8:
            tensor_unparallelize(model)
            after = {name: vars(module).get("forward") for name, module in model.named_modules()}
            assert after == before

    run_sharded(model_of("Llama").eval(), 1, body)


@pytest.mark.parametrize("int8", [False, True])
def test_sharded_experts(int8: bool, counter: CompileCounter) -> None:
    torch.manual_seed(0)
    config = config_of("Mixtral", **GROUPED, num_local_experts=5)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()

    def body(model: Any, comm: Communicator) -> None:
        if int8:
            quantize_weights(model)
        # Eleven rows of two experts each have no operator in floats: that call is not compiled.
        expected = [model.generate(tokens(rows, 5), **GREEDY) for rows in (1, 11)]
        compile_decoding(model, max_length=64)
        for each, programs in zip(expected, (1, 1 + int8), strict=True):
            assert torch.equal(model.generate(tokens(len(each), 5), **GREEDY), each)
            assert counter.frame_count == programs

    run_sharded(plain, 1, body)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="takes a transformers model that generates; Linear"):
        compile_decoding(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the model is on meta"):
        compile_decoding(model_of("Llama").to("meta"))
    encoder_and_decoder = transformers.T5ForConditionalGeneration(copy.deepcopy(ENCODERS["T5"]))
    with pytest.raises(ValueError, match="takes a decoder alone"):
        compile_decoding(encoder_and_decoder)


def generated(comm: Communicator) -> list[Any]:
    model = tensor_parallelize(model_of("Llama").eval(), "auto", comm)
    expected = model.generate(tokens(2, 5), **GREEDY).tolist()
    compile_decoding(model, max_length=64)
    return [expected, model.generate(tokens(2, 5), **GREEDY).tolist()]


@pytest.mark.processes
def test_ranks_compile_at_the_same_time() -> None:
    (expected, first), other = run_processes(2, generated)
    assert first == expected and other == [expected, expected]
