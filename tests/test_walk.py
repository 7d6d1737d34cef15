"""How many functions, files and frames a reader goes through to follow a call."""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pipes import on_cpus
from support.ranks import run_threads
from support.walk import COMPREHENSIONS, ROOT, is_own, python_calls
from torch import nn

from pipekernels import Communicator, RowParallelLinear, load_pretrained, tensor_parallelize

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDS = {
    "calls of a forward": 120,
    "functions of a forward": 70,
    "files of a forward": 12,
    "frames around a layer": 8,
    "functions of a backward": 35,
}
BELOW = ("pipekernels/comm/", "pipekernels/device/", "pipekernels/ops/")


def files_of(calls: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(":")[0] for name in calls if is_own(name)))


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_mini_batch_is_a_short_walk(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    pipe = on_cpus(layers, [4, 4], chunks=chunks, checkpoint="never", execution="inline")
    x, linear = torch.randn(8, 4), nn.functional.linear
    pipe(x).sum().backward()
    outputs: list[torch.Tensor] = []
    calls = [*filter(is_own, python_calls(lambda: outputs.append(pipe(x))))]
    forward = dict.fromkeys(calls)
    loss = outputs[0].sum()
    backward = dict.fromkeys(filter(is_own, python_calls(loss.backward)))
    stacks: list[list[str]] = []

    def linear_with_stack(*args: Any) -> torch.Tensor:
        stack = [each for each in traceback.extract_stack() if each.name not in COMPREHENSIONS]
        names = [f"{each.filename.removeprefix(ROOT)} {each.name}" for each in stack]
        stacks.append([name for name in names if is_own(name)])
        return linear(*args)

    monkeypatch.setattr(nn.functional, "linear", linear_with_stack)
    pipe(x)
    frames = max(stacks, key=len)
    walks = (calls, forward, files_of(forward), frames, backward)
    for bound, found in zip(BOUNDS, walks, strict=True):
        assert len(found) <= BOUNDS[bound], "\n".join([f"{len(found)} {bound}:", *found])
    # A single microbatch runs in the caller's graph, whose backward is autograd's.
    assert forward and frames and bool(backward) == (chunks > 1)


def test_a_row_parallel_layer_is_a_short_walk() -> None:
    """As a decoder calls it. Many rows, with gradients, pass autograd and the tensor's checks."""

    def walk(comm: Communicator) -> None:
        layer = RowParallelLinear(8, 4, comm=comm)
        x = torch.randn(1, layer.weight.shape[1])
        with torch.no_grad():
            layer(x)
            assert 0 < len(files_of(python_calls(lambda: layer(x)))) <= 5
        many = x.repeat(32, 1)
        layer(many)
        assert 0 < len(files_of(python_calls(lambda: layer(many)))) <= 7

    run_threads(2, walk)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="the backend needs torch 2.7")
def test_a_sum_of_torch_distributed_is_a_short_walk() -> None:
    dist.init_process_group("pipekernels", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(8)
        dist.all_reduce(x)
        assert 0 < len(files_of(python_calls(lambda: dist.all_reduce(x)))) <= 3
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_carried_plan_is_a_short_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Llama on the meta device, on its way to its shards. Walks end at ``BELOW``, whose files
    the calls of communicators and tensors pass."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, "peft", raising=False)  # Other tests may import it.
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=30, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        models = [transformers.LlamaForCausalLM(config) for _ in range(2)]

    def upper_files(call: Callable[[], Any]) -> list[str]:
        return [file for file in files_of(python_calls(call)) if not file.startswith(BELOW)]

    def walk(comm: Communicator) -> None:
        model = models[comm.rank]
        sharding = upper_files(lambda: tensor_parallelize(model, "auto", comm))
        assert 0 < len(sharding) <= 12, sharding
        assert not any("/derive/" in file for file in sharding)
        loading = upper_files(lambda: load_pretrained(model, tmp_path))
        assert 0 < len(loading) <= 12, loading
        assert not any(parameter.is_meta for parameter in model.parameters())

    run_threads(2, walk)
