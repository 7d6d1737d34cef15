"""How many functions, files and frames a reader goes through to follow a call."""

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pipes import on_cpus
from support.ranks import run_threads
from torch import nn

from pipekernels import Communicator, RowParallelLinear, load_pretrained, tensor_parallelize

pytestmark = pytest.mark.usefixtures("one_thread")

# By number of microbatches. One is the model; of four, three are recomputed.
BOUNDS = {
    1: {
        "calls of a forward": 35,
        "functions of a mini-batch": 27,
        "files of a mini-batch": 9,
        "frames around a layer": 6,
        "functions of a backward": 0,
        "functions of a step": 52,
        "files of a step": 12,
    },
    4: {
        "calls of a forward": 82,
        "functions of a mini-batch": 49,
        "files of a mini-batch": 10,
        "frames around a layer": 9,
        "functions of a backward": 29,
        "functions of a step": 56,
        "files of a step": 12,
    },
}
ROOT = f"{Path(__file__).parents[1]}/"
# Their frames depend on Python's version.
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def own_calls(call: Callable[[], Any]) -> list[str]:
    """The package's functions that ``call()`` calls, in order: file, line and name."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS:
            file = code.co_filename.removeprefix(ROOT)
            names.append(f"{file}:{code.co_firstlineno} {code.co_name}")

    gc.disable()  # Finalizers that it calls would be counted.
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return [name for name in names if name.startswith("pipekernels/")]


def files_of(calls: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(":")[0] for name in calls))


def functions_of(call: Callable[[], Any]) -> list[str]:
    return list(dict.fromkeys(own_calls(call)))


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_mini_batch_is_a_short_walk(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all other arguments by default."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    pipe = on_cpus(layers, [4, 4], chunks=chunks)
    x, target, linear = torch.randn(8, 4), torch.randn(8, 4), nn.functional.linear
    step = lambda: pipe.train_step(x, target, nn.functional.mse_loss, schedule="1f1b")
    pipe(x).sum().backward()  # Makes what later mini-batches reuse.
    step()
    outputs: list[torch.Tensor] = []
    calls = own_calls(lambda: outputs.append(pipe(x)))
    backward = functions_of(outputs[0].sum().backward)
    both, stepped = dict.fromkeys([*calls, *backward]), functions_of(step)
    stacks: list[list[str]] = []

    def linear_with_stack(*args: Any) -> torch.Tensor:
        stack = [each for each in traceback.extract_stack() if each.name not in COMPREHENSIONS]
        names = [f"{each.filename.removeprefix(ROOT)} {each.name}" for each in stack]
        stacks.append([name for name in names if name.startswith("pipekernels/")])
        return linear(*args)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", linear_with_stack)
        pipe(x)
    frames = max(stacks, key=len)
    walks = (calls, both, files_of([*both]), frames, backward, stepped, files_of(stepped))
    for (bound, most), found in zip(BOUNDS[chunks].items(), walks, strict=True):
        assert len(found) <= most, "\n".join([f"{len(found)} {bound}:", *found])
    # A single microbatch runs in the caller's graph, whose backward is autograd's.
    assert calls and frames and bool(backward) == (chunks > 1)


def test_a_row_parallel_layer_is_a_short_walk() -> None:
    """As a decoder calls it. Many rows, with gradients, pass autograd and the tensor's checks."""
    (comm,) = Communicator.threads(1)
    layer = RowParallelLinear(8, 4, comm=comm)
    x = torch.randn(1, 8)
    with torch.no_grad():
        layer(x)
        assert 0 < len(files_of(own_calls(lambda: layer(x)))) <= 6
    many = x.repeat(32, 1)
    layer(many)
    assert 0 < len(files_of(own_calls(lambda: layer(many)))) <= 9


@pytest.mark.skipif(torch.__version__ < "2.7", reason="the backend needs torch 2.7")
def test_a_sum_of_torch_distributed_is_a_short_walk() -> None:
    dist.init_process_group("pipekernels", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(8)
        dist.all_reduce(x)
        assert 0 < len(files_of(own_calls(lambda: dist.all_reduce(x)))) <= 4
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_carried_plan_is_a_short_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Llama on the meta device, on its way to its shards."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, "peft", raising=False)  # Other tests may import it.
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=30, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        models = [transformers.LlamaForCausalLM(config) for _ in range(2)]

    def walk(comm: Communicator) -> None:
        model = models[comm.rank]
        sharding = files_of(own_calls(lambda: tensor_parallelize(model, "auto", comm)))
        assert 0 < len(sharding) <= 12, sharding
        assert not any("/derive/" in file for file in sharding)
        loading = files_of(own_calls(lambda: load_pretrained(model, tmp_path)))
        assert 0 < len(loading) <= 12, loading
        assert not any(parameter.is_meta for parameter in model.parameters())

    run_threads(2, walk)
