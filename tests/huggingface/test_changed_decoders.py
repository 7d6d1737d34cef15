"""Compiled decoders whose layers change between calls of ``generate``, with the compiler behind,
against the same model uncompiled."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.levels import in_gate
from support.models import assert_close_to_largest, model_of, tokens
from support.reference import gamma
from torch import nn

from pipekernels.huggingface import compile_decoding, decoding
from pipekernels.tensor_parallel import tensor_unparallelize

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.compile]
FAMILIES = (
    *("Llama", "Qwen3", "Gemma 2", "Phi-3", "GPT-NeoX"),
    *("GPT-2", "GPT-BigCode", "Bloom", "OPT", "Mistral"),
)
Change = Callable[[Any], Any]
# Of float32, in which models compute norms and generate() returns logits: two layers have eight
# products each, of at most 48 terms.
BOUND = gamma(2 * 8 * 48, 2**-24)


@pytest.fixture(autouse=True)
def texts_pass_a_multiple_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_KEYS", 8)


def layers_of(model: Any) -> Any:
    modules = model.get_decoder().modules()
    return next(each for each in modules if isinstance(each, nn.ModuleList))


def linear(model: Any, index: int = 1) -> Any:
    kinds = nn.Linear, transformers.pytorch_utils.Conv1D
    return next(each for each in layers_of(model)[index].modules() if isinstance(each, kinds))


def on_adapters(call: Callable[[Any], Any]) -> Change:
    def change(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                call(module)

    return change


def add_adapter(name: str, **options: Any) -> Change:
    def change(model: Any) -> None:
        torch.manual_seed(3)
        options_of_both = {"r": 3, "target_modules": "all-linear", "init_lora_weights": False}
        config = peft.LoraConfig(**options_of_both | options)
        peft.inject_adapter_in_model(config, model, name)
        model.double()

    return change


def adapters() -> list[Change]:
    pattern = {".*1.*": 20}
    return [
        add_adapter("first", lora_alpha=6, alpha_pattern=pattern),
        add_adapter("second", lora_alpha=12),
        on_adapters(lambda layer: layer.set_adapter(["second"])),
        on_adapters(lambda layer: layer.set_scale("second", 0.3)),
        on_adapters(lambda layer: layer.enable_adapters(False)),
        on_adapters(lambda layer: layer.enable_adapters(True)),
        on_adapters(lambda layer: layer.merge()),
        on_adapters(lambda layer: layer.unmerge()),
        lambda model: add_adapter("dora", use_dora=True)(model),
        on_adapters(lambda layer: layer.set_adapter(["dora"])),
    ]


def hooks() -> list[Change]:
    handles: list[Any] = []

    def remove(_: Any) -> None:
        while handles:
            handles.pop().remove()

    def everywhere(model: Any) -> None:
        if not handles:
            hook = nn.modules.module.register_module_forward_hook
            is_linear = lambda module: type(module) is type(linear(model))
            handles.append(hook(lambda module, _, y: y * 0.9 if is_linear(module) else None))

    return [
        lambda model: handles.append(linear(model).register_forward_hook(lambda _, x, y: y * 2)),
        remove,
        lambda model: handles.append(
            layers_of(model)[0].register_forward_pre_hook(lambda _, x: (x[0] * 2, *x[1:]))
        ),
        remove,
        everywhere,
        remove,
        lambda model: model.generate(
            tokens(2, 5), output_hidden_states=True, return_dict_in_generate=True
        ),
    ]


def weights() -> list[Change]:
    def assign(model: Any) -> None:
        state = {name: value * -0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def replace_forward(model: Any) -> None:
        layer = layers_of(model)[1]
        forward = layer.forward
        layer.forward = lambda x, *args, **kwargs: forward(x * 2, *args, **kwargs)

    return [
        lambda model: linear(model).weight.mul_(-1),
        lambda model: setattr(linear(model).weight, "data", linear(model).weight.data * -2),
        lambda model: setattr(linear(model), "weight", nn.Parameter(linear(model, 0).weight * 2)),
        assign,
        replace_forward,
        lambda model: delattr(layers_of(model)[1], "forward"),
    ]


KINDS: dict[str, Callable[[], list[Change]]] = {
    "adapters": adapters,
    "hooks": hooks,
    "weights": weights,
}


def generated(model: Any, length: int = 5, **options: Any) -> Any:
    """Greedy, of which the end of sequence is not the end."""
    fixed = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    number = {"max_new_tokens": 5, "min_new_tokens": 5}
    return model.generate(tokens(2, length), **fixed, **number, **options)


def logits(model: Any, **options: Any) -> dict[str, Any]:
    return {"logits": torch.stack(generated(model, **options).logits)}


# All kinds of changes in two families, and one in each of the others.
CHANGED = [
    (name, kind)
    for (i, name), (j, kind) in itertools.product(enumerate(FAMILIES), enumerate(KINDS))
    if name in ("Llama", "GPT-NeoX") or (i + j) % 3 == 0
]


@pytest.mark.parametrize(("name", "kind"), in_gate([("GPT-NeoX", "adapters")], CHANGED))
def test_changes(name: str, kind: str) -> None:
    plain = model_of(name).eval()
    model = compile_decoding(copy.deepcopy(plain), max_length=32)
    assert_close_to_largest(logits(model), logits(plain), BOUND)
    for change in KINDS[kind]():
        with torch.no_grad():
            change(plain)
            change(model)
        assert_close_to_largest(logits(model), logits(plain), BOUND)


@pytest.mark.parametrize("name", in_gate(["Mistral"], FAMILIES))
def test_what_is_saved_and_returned_is_that_of_the_plain_model(name: str, tmp_path: Path) -> None:
    plain = model_of(name).eval()
    model = compile_decoding(copy.deepcopy(plain), max_length=8)
    caches = [generated(each).past_key_values for each in (plain, model)]
    # Which grow with the text, beyond max_length.
    longer = [
        logits(each, length=12, past_key_values=cache)
        for each, cache in zip((plain, model), caches, strict=True)
    ]
    assert_close_to_largest(longer[1], longer[0], BOUND)
    for each in (plain, model):
        each.save_pretrained(tmp_path / str(each is model))
    for file in ("generation_config.json", "model.safetensors"):
        saved = [(tmp_path / folder / file).read_bytes() for folder in ("False", "True")]
        assert saved[0] == saved[1], file
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for each in copies:
        assert_close_to_largest(logits(each), logits(plain), BOUND)
    tensor_unparallelize(model)
    assert vars(model).keys() == vars(plain).keys()
