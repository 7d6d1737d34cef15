"""Ways to train a sharded model of transformers, each beside the model on one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from support.models import model_of, tokens
from support.ranks import run_processes, run_threads
from torch import nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import clip_grad_norm_

pytestmark = pytest.mark.slow


WAYS = ["accumulation", "autocast", "checkpointing", "checkpointing later", "clipping"]


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Llama, tied", "Qwen3", "GPT-2"])
def test_a_way_to_train(name: str, way: str) -> None:
    plain = model_of(name).train()
    if way == "autocast":
        plain.float()
    if way == "checkpointing":
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    copies = [copy.deepcopy(plain) for _ in range(2)]
    expected = train(plain, way)
    assert expected[-1] != expected[0]

    def body(comm: Communicator) -> list[float]:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        if way == "checkpointing later":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return train(model, way)

    first, second = run_threads(2, body)
    assert first == second
    assert first == pytest.approx(expected, rel=2e-2 if way == "autocast" else 1e-6)


def compiled(comm: Communicator) -> tuple[list[float], list[float]]:
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

    return losses(whole, model), losses(plain, plain)


@pytest.mark.processes
@pytest.mark.compile
@pytest.mark.timeout(180)
def test_the_whole_model_compiles_into_one_graph() -> None:
    for found, expected in run_processes(2, compiled, limit=150.0):
        assert found == pytest.approx(expected, rel=1e-6)
        assert found[-1] != found[0]
