"""Folders of safetensors files, read shard by shard and written again."""

import contextlib
import copy
import ctypes
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks import assert_same_state
from support.levels import in_gate
from support.models import (
    DECODERS,
    ENCODERS,
    KINDS_OF_DECODERS,
    inputs_of,
    model_of,
    run_sharded,
    tokens,
)
from support.ranks import run_processes, run_threads
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface.load import _Target
from pipekernels.tensor_parallel import load_pretrained

safetensors = pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file

pytestmark = pytest.mark.slow
NAMES = [*DECODERS, "BERT", "T5", "ViT"]
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SHARD = "shard-00001-model-00001-of-00002.safetensors"


def meta_model(name: str) -> nn.Module:
    config = copy.deepcopy((DECODERS | ENCODERS)[name])
    auto = transformers.AutoModelForCausalLM if name in DECODERS else transformers.AutoModel
    with torch.device("meta"):
        model = auto.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model.eval()


@pytest.mark.parametrize("name", in_gate([*KINDS_OF_DECODERS, "BERT"], NAMES))
def test_saved_loaded_on_other_ranks_and_saved_again(name: str, tmp_path: Path) -> None:
    """4 ranks, then 2 from the meta device, then one."""
    plain = model_of(name).eval()

    @torch.no_grad()
    def output(model: nn.Module) -> Tensor:
        return model(**inputs_of(name))[0]

    expected = output(plain)

    def save(model: Any, _: Communicator) -> None:
        model.save_pretrained(tmp_path / "4", max_shard_size="20KB")

    def load(comm: Communicator) -> None:
        model = tensor_parallelize(meta_model(name), "auto", comm)
        load_pretrained(model, tmp_path / "4")
        assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
        # Not that of a mapped file, which may change.
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
        torch.testing.assert_close(output(model), expected, rtol=1e-6, atol=1e-6)
        model.save_pretrained(tmp_path / "2", max_shard_size="20KB")

    run_sharded(plain, 4, save)
    run_threads(2, load)
    plain.save_pretrained(tmp_path / "1", max_shard_size="20KB")
    files = {path.name for path in (tmp_path / "1").glob("model*")}
    assert len(files) > 2
    for folder in ("4", "2"):
        for file in files:
            assert (tmp_path / folder / file).read_bytes() == (tmp_path / "1" / file).read_bytes()
    model = meta_model(name)
    load_pretrained(model, tmp_path / "2")
    assert_same_state(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(output(model), expected, rtol=1e-6, atol=1e-6)


def test_each_rank_reads_its_slices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model_of("Llama")
    plain.save_pretrained(tmp_path)
    read: Counter[int] = Counter()
    counting(monkeypatch, read)

    def body(model: nn.Module, comm: Communicator) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()
        load_pretrained(model, tmp_path)
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert read[get_ident()] == held < 0.3 * sum(p.nbytes for p in plain.parameters())
        own: Any = model.get_submodule("model.layers.0.mlp.down_proj")
        assert torch.equal(
            own.weight, own.shard("weight", plain.state_dict()[f"{own.name}.weight"])
        )

    run_sharded(plain, 4, body)


def test_what_one_rank_raises_all_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model_of("Llama")
    plain.save_pretrained(tmp_path / "right")
    model_of("GPT-2").save_pretrained(tmp_path / "wrong")
    (tmp_path / "cut").mkdir()
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes((tmp_path / "right" / file.name).read_bytes()[:-1])
    read, failing = _Target.read, set()

    def failing_read(target: _Target, file: Any) -> Tensor:
        if get_ident() in failing:
            raise MemoryError("full")
        return read(target, file)

    monkeypatch.setattr(_Target, "read", failing_read)

    def body(model: Any, comm: Communicator) -> None:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for name, error, says in (
            ("missing", FileNotFoundError, "rank 1: .*missing has neither"),
            ("cut", ValueError, "rank 1: .*cut/model.safetensors is not a file of safetensors"),
            ("wrong", ValueError, "rank 1: .*wrong does not fit Llama"),
        ):
            with pytest.raises(error, match=says):
                load_pretrained(model, tmp_path / ("right", name)[comm.rank])
            assert_same_state(model.state_dict(), before)
        failing.update([get_ident()] * comm.rank)
        with pytest.raises(RuntimeError, match="rank 1: MemoryError: full"):
            load_pretrained(model, tmp_path / "right")
        failing.clear()
        with pytest.raises(RuntimeError, match="rank 0: NotADirectoryError"):
            model.save_pretrained(file / "folder")
        for parameter in model.parameters():
            parameter.data.zero_()
        load_pretrained(model, tmp_path / "right")
        assert_same_state(model.state_dict(), before)

    run_sharded(plain, 2, body)


def test_sharded_embeddings_are_not_resized() -> None:
    def body(model: Any, _: Communicator) -> None:
        with pytest.raises(TypeError, match="that are sharded; call it before tensor_parallelize"):
            model.resize_token_embeddings(70)
        assert model.resize_token_embeddings() is model.get_input_embeddings()

    run_sharded(model_of("Llama"), 2, body)


M_MMAP_THRESHOLD = -3  # Of malloc.h.


def memory(field: str) -> int:
    """Bytes of this process, by a field of /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def loading(comm: Communicator, folder: Path, bits: int | None) -> tuple[int, int, int]:
    """Bytes of this rank's weights, of the process before they are loaded, and at the most until
    they have given logits."""
    # glibc gives tensors that are freed back to the system, and keeps none for the next ones.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tensor_parallelize(model, "auto", comm)
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = memory("VmRSS:")
    load_pretrained(model, folder, bits=bits)
    with torch.no_grad():
        model(tokens(1, 4))
    return sum(parameter.nbytes for parameter in model.parameters()), before, memory("VmHWM:")


@pytest.mark.full
@pytest.mark.processes
def test_no_rank_ever_holds_more_than_its_share(tmp_path: Path) -> None:
    """Of a GiB. A process has a base of its own: Python, torch, transformers, and the model on the
    meta device."""
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=8000,
    )  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_config(config)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    plain.save_pretrained(tmp_path)
    del plain
    for held, base, peak in run_processes(2, loading, tmp_path, None):
        assert 2**29 < held < 0.51 * whole and base < 2**29
        assert peak <= base + 1.1 * held
    # Quantized while it is read: beside the integers there is one layer, at most the head, in the
    # mapped file, in floats, and in what rounding makes of them: five tensors of the same size.
    head = 4 * 1024 * 8000 // 2
    for held, base, peak in run_processes(2, loading, tmp_path, 4):
        assert held < 0.2 * 0.51 * whole
        assert peak <= base + 1.1 * held + 7 * head


def counting(monkeypatch: pytest.MonkeyPatch, read: Counter[int]) -> None:
    """Count the bytes that each thread reads of safetensors files."""
    real = safetensors.safe_open

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, key: Any) -> torch.Tensor:
            value = self.inner[key]
            read[get_ident()] += value.nbytes
            return value

    @contextlib.contextmanager
    def opened(*args: Any, **options: Any) -> Iterator[Any]:
        with real(*args, **options) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda key: Slice(file.get_slice(key)))

    monkeypatch.setattr(safetensors, "safe_open", opened)


def test_what_does_not_fit_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    plain = model_of("Llama")
    plain.save_pretrained(tmp_path)
    before = {key: value.clone() for key, value in plain.state_dict().items()}

    def refused(error: type[Exception], message: str, model: nn.Module = plain) -> None:
        with pytest.raises(error, match=message):
            load_pretrained(model, tmp_path)
        assert_same_state(plain.state_dict(), before)

    refused(ValueError, r"Linear: they lack 'weight'; they lack 'bias'; make", nn.Linear(2, 2))
    other = copy.deepcopy(DECODERS["Llama"])
    other.intermediate_size = 40
    wrong = transformers.AutoModelForCausalLM.from_config(other)
    message = r"gate_proj.weight' has the shape \(40, 32\), in the files \(48, 32\)"
    refused(ValueError, message, wrong)


def test_files_are_those_of_from_pretrained(tmp_path: Path) -> None:
    """Of a folder that gets more and more of them, each with other values."""
    plain = model_of("Llama")
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    config, index = tmp_path / CONFIG, tmp_path / INDEX

    def write(name: str, scale: int) -> None:
        state = {key: value * scale for key, value in plain.state_dict().items()}
        save_file(state, tmp_path / name, metadata={"format": "pt"})

    def check() -> None:
        expected = type(plain).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
        model = copy.deepcopy(plain)
        load_pretrained(model, tmp_path)
        assert_same_state(model.state_dict(), expected)

    check()
    entries = json.loads(index.read_text())
    entries["weight_map"]["more"] = "model-00009-of-00099.safetensors"
    index.write_text(json.dumps(entries))
    names = [
        "model-00009-of-00099.safetensors",
        "model.fp16.safetensors",
        SINGLE,
        "weights.safetensors",
    ]
    for scale, name in enumerate(names, 2):
        write(name, scale)
        check()
    fields = json.loads(config.read_text())
    for name in ("weights.safetensors", index.name):
        config.write_text(json.dumps(fields | {"transformers_weights": name}))
        check()


# Contents of files, where True is a file of safetensors; what the error says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "but no weights"),
    "pickles": ({"pytorch_model.bin": ""}, "alone, but \\['pytorch_model.bin'\\]; load the model"),
    "distributed": ({SINGLE: True, SHARD: True}, f"alone, but \\['{SHARD}'\\]; load"),
    "other folder": ({INDEX: {"weight_map": {"0.weight": "../a"}}}, r"names \.\./a, which"),
    "list": ({INDEX: {"weight_map": [[SINGLE]]}}, r"names \[\[.*\]\], which"),
    "lost": ({INDEX: {"weight_map": {"0.weight": SINGLE}}}, f"names {SINGLE}, which .* lacks"),
    "chosen": ({CONFIG: {"transformers_weights": f"../{INDEX}"}}, r"config.json names \.\./"),
    "cut": ({INDEX: "{"}, "index.json has no JSON object"),
    "nested": ({INDEX: "[" * 100_000}, "index.json has no JSON object"),
    "array": ({SINGLE: True, CONFIG: []}, r"config.json has no JSON object, but \[\]; copy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    files, says = REFUSED[name]
    for file, content in files.items():
        if content is True:
            save_file({"0.weight": torch.ones(2, 2)}, tmp_path / file)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / file).write_text(text)
    with pytest.raises((FileNotFoundError, ValueError), match=says):
        load_pretrained(nn.Sequential(nn.Linear(2, 2, bias=False)), tmp_path)


def test_buffers_without_a_value_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    model.register_buffer("table", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="buffers on the meta device, table, that no file has"):
        load_pretrained(model, tmp_path)
    assert not model.weight.any()
    model.table = torch.ones(3)
    load_pretrained(model, tmp_path)
    assert model.weight.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "loaded"),
        ({"0.weight": torch.ones(2, 2, dtype=torch.bfloat16)}, "loaded"),
        ({"0.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "files F8_E4M3 without a scale"),
        ({"0.weight_scale_inv": torch.ones(1)}, "quantized: they have '0.weight_scale_inv'"),
        ({"0.input_scale": torch.ones(1)}, "quantized: they have '0.input_scale'"),
        ({"0.weight.quant_state.nf4": torch.ones(1)}, "quantized: they have '0.weight.quant_state"),
        ({"1.scale": torch.ones(1)}, "loaded"),
        (
            {"config": {"quant_method": "hqq"}},
            "quantized: 'quantization_config' has quant_method='hqq'",
        ),
    ],
)
def test_quantized_weights_are_not_taken_for_values(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    files = {"0.weight": torch.ones(2, 2)} | change
    config = files.pop("config", None)
    save_file(files, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = nn.Sequential(nn.Linear(2, 2, bias=False)).requires_grad_(False)
    model[0].weight.zero_()
    with pytest.raises(ValueError, match=says) if says != "loaded" else contextlib.nullcontext():
        load_pretrained(model, tmp_path)
    assert model[0].weight.all() == (says == "loaded")
