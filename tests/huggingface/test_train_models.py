"""Ways to train a sharded model of transformers, each beside the model on one process."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.levels import in_gate
from support.models import model_of, run_sharded, tokens
from torch import nn

from pipekernels import Communicator

pytestmark = pytest.mark.slow

WAYS = ["autocast", "checkpointing", "checkpointing later"]


def train(model: nn.Module, way: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, values = tokens(4, 9), []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        values.append(loss.item())
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
