"""Checkpoints of integers and float8: written here from the specifications of their formats, read
slice by slice, and compared with the weights widened by torch."""

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from support.checks import assert_same_state
from support.ranks import run_threads
from support.reference import gamma
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from test_load import counting

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface import load_pretrained
from pipekernels.tensor_parallel import full_state_dict, quantize_weights, tensor_unparallelize

pytestmark = pytest.mark.slow
SIZES = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61,
}  # fmt: skip
CONFIGS = {
    "Llama": transformers.LlamaConfig(**SIZES),
    # With biases; ranks have two heads and one.
    "Qwen2, tied": transformers.Qwen2Config(
        **SIZES | {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3},
        tie_word_embeddings=True,
    ),
    "Mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=3),
}


def words(values: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Unsigned ``[rows, columns]`` in words of 32 bits; place i of a word has element order[i]."""
    parts = values.long().unflatten(-1, (-1, 32 // bits))
    shifted = [parts[..., e] << bits * i for i, e in enumerate(order[: 32 // bits])]
    return torch.stack(shifted).sum(0).to(torch.int32)


class Integers:
    """Random ones of a weight ``[n, k]``."""

    def __init__(self, shape: tuple[int, int], config: dict[str, Any]) -> None:
        (n, k), self.bits = shape, config["bits"]
        group = k if config["group_size"] == -1 else config["group_size"]
        middle = 1 << (self.bits - 1)
        self.values = torch.randint(0, 2 * middle, shape)
        self.zero = torch.full((n, k // group), middle)
        if not config["sym"]:
            self.zero.random_(1, 2 * middle)
        self.scale = (torch.rand(n, k // group) + 0.5).div(middle * k**0.5).half()
        self.groups = torch.arange(k) // group
        if config.get("desc_act"):
            self.groups = self.groups[torch.randperm(k)]

    def floats(self) -> Tensor:
        return (self.values - self.zero[:, self.groups]) * self.scale.float()[:, self.groups]


def gptq(own: Integers, config: dict[str, Any]) -> dict[str, Tensor]:
    zero = own.zero - int(config["checkpoint_format"] == "gptq")
    return {
        "qweight": words(own.values, own.bits).t(),
        "qzeros": words(zero.t(), own.bits),
        "scales": own.scale.t(),
        "g_idx": own.groups.int(),
    }


def awq(own: Integers, _: dict[str, Any]) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros = (words(each.t(), 4, order) for each in (own.values, own.zero))
    return {"qweight": qweight, "qzeros": qzeros, "scales": own.scale.t()}


def compressed(own: Integers, config: dict[str, Any]) -> dict[str, Tensor]:
    shape, packed = torch.tensor(own.values.shape), words(own.values, own.bits)
    state = {"weight_packed": packed, "weight_shape": shape, "weight_scale": own.scale.bfloat16()}
    zero = words(own.zero.t(), own.bits).t()
    if config["format"] == "int-quantized":
        state = {"weight": (own.values - 128).to(torch.int8), "weight_scale": own.scale.bfloat16()}
        zero = (own.zero - 128).to(torch.int8)
    return state if config["sym"] else state | {"weight_zero_point": zero}


def method(name: str, bits: int, group: int, **fields: Any) -> dict[str, Any]:
    fields = {"checkpoint_format": "gptq", "sym": True} | fields
    return {"quant_method": name, "bits": bits, "group_size": group, **fields}


WRITERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
}
PACKED, INT8 = {"format": "pack-quantized"}, {"format": "int-quantized"}
CASES = {
    "gptq": method("gptq", 4, 32),
    "gptq, zeros": method("gptq", 4, 32, sym=False),
    "gptq v2, 8 bits": method("gptq", 8, -1, sym=False, checkpoint_format="gptq_v2"),
    "awq": method("awq", 4, 32, sym=False, version="gemm"),
    "packed": method("compressed-tensors", 4, 32, **PACKED),
    "packed, zeros": method("compressed-tensors", 4, -1, sym=False, **PACKED),
    "packed, 8 bits": method("compressed-tensors", 8, 32, sym=False, **PACKED),
    "int8": method("compressed-tensors", 8, -1, **INT8),
    "int8, zeros": method("compressed-tensors", 8, -1, sym=False, **INT8),
    "fp8": {"quant_method": "fp8", "weight_block_size": [48, 40]},
}


def write(folder: Path, family: str, config: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint; returns its model of floats, and what the files contain."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    for parameter in model.parameters():
        parameter.data.uniform_(-0.3, 0.3)
    model.save_pretrained(folder)
    floats, state = load_file(folder / "model.safetensors"), {}
    for key, value in floats.items():
        name = key.removesuffix(".weight")
        if not re.search(r"(proj|\.w\d)\.weight$", key):
            state[key] = value
        elif config["quant_method"] == "fp8":
            state[key] = value.to(torch.float8_e4m3fn)
            n, k = value.shape
            scale = torch.rand(-(-n // 48), -(-k // 40))
            state[f"{name}.weight_scale_inv"] = scale
            wide = scale.repeat_interleave(48, 0)[:n].repeat_interleave(40, 1)[:, :k]
            floats[key] = state[key].float() * wide
        else:
            own = Integers((value.shape[0], value.shape[1]), config)
            if config["quant_method"] == "compressed-tensors":
                own.scale = own.scale.bfloat16()
            floats[key] = own.floats()
            tensors = WRITERS[config["quant_method"]](own, config)
            state |= {f"{name}.{part}": each for part, each in tensors.items()}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    load_pretrained(model, folder)
    save(folder, state, config)
    return model, state


def save(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    state = {key: value.contiguous() for key, value in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))


def sharded(folder: Path, comm: Communicator, plan: Any = "auto") -> Any:
    """The checkpoint's model on the meta device."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # Not in float64: the kernel, which rounds the input of a layer too, takes float32.
    return tensor_parallelize(model.double().eval(), plan, comm)


def count_integers(model: nn.Module) -> int:
    """The layers that have some."""
    return sum(bool(getattr(layer, "integers", None)) for layer in model.modules())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", ["Llama", "Qwen2, tied"])
def test_weights_are_those_widened_by_torch(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, state = write(tmp_path, family, CASES[name])
    ids, expected = torch.randint(61, (2, 7)), plain.double().state_dict()
    whole = sum(each.nbytes for each in state.values())
    read: Counter[int] = Counter()
    counting(monkeypatch, read)

    @torch.no_grad()
    def body(comm: Communicator) -> None:
        model = sharded(tmp_path, comm)
        load_pretrained(model, tmp_path)
        # Beside scales, and the group of each feature, that all ranks read.
        assert read[get_ident()] < 0.6 * whole
        assert count_integers(model) == (0 if name == "fp8" else 7)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-9, atol=1e-9)
        # By the kernel, which rounds its input, but for these numbers.
        layer = model.get_submodule("model.layers.0.mlp.gate_proj")
        [(start, rows)] = layer.spans("weight")
        own = plain.get_submodule(layer.name).weight[start : start + rows]
        x = torch.randint(0, 2, (3, layer.in_features)).float() * 254 - 127
        y = layer(x.to(layer.weight.dtype if name == "fp8" else x.dtype)).double()
        bound = gamma(layer.in_features + 8, 2**-24) * (x.abs().double() @ own.abs().t())
        assert ((y - x.double() @ own.t()).abs() <= bound).all()
        full = full_state_dict(model)
        other = sharded(tmp_path, comm)
        load_pretrained(other, tmp_path)
        other.requires_grad_(False)
        for parameter in other.parameters():
            parameter.zero_()
        other.load_state_dict(full)
        assert_same_state(other.state_dict(), model.state_dict())
        tensor_unparallelize(model)
        assert_same_state(model.state_dict(), expected)

    run_threads(2, body)


@pytest.mark.parametrize("name", ["gptq, zeros", "int8", "fp8"])
@pytest.mark.parametrize("plan", ["auto", {"*.experts": "expert_parallel"}])
def test_experts_have_the_same_integers(name: str, plan: Any, tmp_path: Path) -> None:
    plain, _ = write(tmp_path, "Mixtral", CASES[name])
    plain.set_experts_implementation("eager")  # Others do not take float64.
    ids, expected = torch.randint(61, (2, 7)), plain.double().state_dict()

    @torch.no_grad()
    def body(comm: Communicator) -> None:
        model = sharded(tmp_path, comm, plan)
        load_pretrained(model, tmp_path)
        assert bool(count_integers(model)) == (name != "fp8")
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-9, atol=1e-9)
        tensor_unparallelize(model)
        assert_same_state(model.state_dict(), expected)

    run_threads(2, body)


REFUSED = {  # A configuration, fields that are changed afterwards, a tensor that is removed.
    "3 bits": (CASES["gptq"], {"bits": 3}, "", r"_proj.qweight' has bits=3 and .* not 8 or 4"),
    "version": (CASES["gptq"], {"checkpoint_format": "marlin"}, "", r"checkpoint_format='marlin'"),
    "scale": (CASES["gptq"], {}, "k_proj.scales", r"k_proj.scales' is missing beside .*qweight"),
    "groups": (CASES["gptq"], {"group_size": 64}, "", r"_proj' has scales of F16 .* groups of 64"),
    "cut": (method("gptq", 4, 64), {}, "", "down_proj' has 96 input .* pass bits=8 or bits=4"),
    "16": (method("gptq", 4, 16), {}, "", "in groups of 16 .* layers take multiples of 32"),
    "act-order": (method("gptq", 4, 32, desc_act=True), {}, "", "act-order .* pass bits=8"),
    "gemv": (CASES["awq"], {"version": "gemv"}, "", "qweight' has bits=4 and version='gemv'"),
    "rotated": (CASES["packed"], {"transform_config": {"R1": {}}}, "", "has a transform_config"),
    "block": (CASES["fp8"], {"weight_block_size": [128, 128]}, "", "_inv' has the shape .* 128"),
    "middle": (CASES["gptq, zeros"], {"sym": True}, "", "zeros that are not the middle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_layers_cannot_take_is_refused(name: str, tmp_path: Path) -> None:
    config, change, removed, says = REFUSED[name]
    plain, state = write(tmp_path, "Llama", config)
    state = {key: value for key, value in state.items() if not removed or removed not in key}
    save(tmp_path, state, config | change)
    ids = torch.randint(61, (2, 7))

    @torch.no_grad()
    def body(comm: Communicator) -> None:
        model = sharded(tmp_path, comm)
        with pytest.raises(ValueError, match=says):
            load_pretrained(model, tmp_path)
        if name == "middle":  # Which is seen when zeros are read.
            return
        assert not count_integers(model)
        if "bits=8" in says:  # The remedy.
            load_pretrained(model, tmp_path, bits=8)
            expected = tensor_parallelize(copy.deepcopy(plain).double(), "auto", comm)
            assert model(ids).logits.equal(quantize_weights(expected)(ids).logits)

    run_threads(2, body)


@pytest.mark.parametrize(
    ("kind", "bits", "symmetric", "group"),
    [
        ("pack-quantized", 4, False, 32),
        ("pack-quantized", 8, True, None),
        ("int-quantized", 8, False, None),
    ],
)
def test_weights_are_those_of_the_package_compressed_tensors(
    kind: str, bits: int, symmetric: bool, group: int | None, tmp_path: Path
) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    strategy = {"strategy": "group", "group_size": 32} if group else {"strategy": "channel"}
    weights = quantization.QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    scales = torch.rand(24, 2 if group else 1) * 0.1 + 0.05
    zeros = torch.randint(-8, 8, scales.shape, dtype=torch.int8)
    floats = {"weight": torch.randn(24, 64), "weight_scale": scales, "weight_zero_point": zeros}
    state = compressor.compress(floats, scheme)
    (tmp_path / "config.json").write_text("{}")
    config = {"quant_method": "compressed-tensors", "format": kind}
    save(tmp_path, {f"0.{part}": value for part, value in state.items()}, config)
    model = nn.Sequential(nn.Linear(64, 24, bias=False))
    load_pretrained(model, tmp_path)
    assert model[0].weight.equal(compressor.decompress(state, scheme)["weight"])
