"""Ways to train a sharded model of transformers, each beside the model on one process."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.checks import full_gradients
from support.levels import in_gate
from support.models import model_of, run_sharded, tokens
from support.ranks import on_ranks, run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pipekernels import Communicator, Pipe, tensor_parallelize
from pipekernels.tensor_parallel import clip_grad_norm_

pytestmark = pytest.mark.slow


WAYS = ["accumulation", "autocast", "checkpointing", "checkpointing later", "clipping"]
Gradients = dict[str, np.ndarray]


def train(model: nn.Module, way: str) -> list[float]:
    """Losses, and norms of gradients where these are clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, values = tokens(4, 9), []
    for _ in range(5):
        optimizer.zero_grad()
        for part in ids.chunk(2 if way == "accumulation" else 1):
            with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext():
                loss = model(input_ids=part, labels=part).loss
            loss.backward()
            values.append(loss.item())
        if way == "clipping":
            values.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
    return values


@pytest.mark.parametrize(
    ("name", "way"),
    in_gate(
        [("Llama, tied", way) for way in WAYS],
        itertools.product(["Llama, tied", "Qwen3", "GPT-2"], WAYS),
    ),
)
def test_a_way_to_train(name: str, way: str) -> None:
    plain = model_of(name).train()
    if way == "autocast":
        plain.float()
    if way == "checkpointing":
        plain.gradient_checkpointing_enable({"use_reentrant": False})

    def body(model: Any, _: Communicator) -> list[float]:
        if way == "checkpointing later":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return train(model, way)

    first, second = run_sharded(plain, 2, body)
    expected = train(plain, way)
    assert expected[-1] != expected[0]
    assert first == second
    assert first == pytest.approx(expected, rel=2e-2 if way == "autocast" else 1e-6)


@pytest.mark.compile
@pytest.mark.timeout(180)
@on_ranks(2, limit=150.0)
def test_the_whole_model_compiles_into_one_graph(comm: Communicator) -> None:
    plain = model_of("Llama")
    model = tensor_parallelize(copy.deepcopy(plain), "auto", comm)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")

    def losses(called: nn.Module, owner: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(owner.parameters(), lr=1e-2)
        values = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = called(input_ids=tokens(2, 9), labels=tokens(2, 9)).loss
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    found = losses(whole, model)
    assert found == pytest.approx(losses(plain, plain), rel=1e-6) and found[-1] != found[0]


class Step(nn.Module):
    """A part of Llama, as a layer of a pipe."""

    def __init__(self, model: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.part, self.rotary = part, [model.model.rotary_emb]  # In a list: it has no parameters.

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        embeddings = self.rotary[0](x, torch.arange(length)[None])
        causal = x.new_full((1, 1, length, length), -torch.inf).triu(1)
        return self.part(x, attention_mask=causal, position_embeddings=embeddings)


def piped_over_ranks(comm: Communicator) -> Gradients:
    model = tensor_parallelize(model_of("Llama").train(), "auto", comm)
    base = model.model
    steps = [Step(model, layer) for layer in base.layers]
    layers = nn.Sequential(base.embed_tokens, *steps, base.norm, model.lm_head)
    pipe = Pipe(layers, [2, len(layers) - 2], devices=["cpu"] * 2, chunks=4)
    return gradients(model, lambda ids: pipe(ids), tokens(4, 9))


def over_two_dimensions(_: Communicator) -> Gradients:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with Communicator.from_process_group(mesh["tensor"].get_group()) as comm:
        model = tensor_parallelize(model_of("Llama").train(), "auto", comm)
        ddp = DistributedDataParallel(model, process_group=mesh["data"].get_group())
        half = tokens(4, 9).chunk(2)[mesh["data"].get_local_rank()]
        return gradients(model, lambda ids: ddp(input_ids=ids).logits, half)


def gradients(model: nn.Module, logits: Callable[[Tensor], Tensor], ids: Tensor) -> Gradients:
    """The full ones, twice accumulated."""
    for _ in range(2):
        functional.cross_entropy(logits(ids).flatten(0, 1), ids.flatten()).backward()
    return {key: value.numpy() for key, value in full_gradients(model).items()}


@pytest.mark.processes
@pytest.mark.parametrize(("body", "ranks"), [(piped_over_ranks, 2), (over_two_dimensions, 4)])
def test_gradients_with_another_kind_of_parallelism(
    body: Callable[..., Any], ranks: int, one_thread: None
) -> None:
    """On one thread each: Llama's norms are in float32, whose roundings may depend on threads."""
    plain, ids = model_of("Llama").train(), tokens(4, 9)
    (comm,) = Communicator.threads(1)
    expected = gradients(tensor_parallelize(plain, "auto", comm), lambda x: plain(x).logits, ids)
    for found in run_processes(ranks, body):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
