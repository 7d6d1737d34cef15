"""``get_device`` and ``move_to_device``; ``meta`` is used as a second device."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from pipekernels import NoChunk, get_device, move_to_device

CPU, META = torch.device("cpu"), torch.device("meta")


def test_get_device() -> None:
    assert get_device("cpu") == CPU
    assert get_device("cuda:1") == torch.device("cuda", 1)
    assert get_device(META) == META


@pytest.mark.parametrize("index", [None, 1])
def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch, index: int | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: index is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    assert get_device("cuda") == torch.device("cuda", index)


@pytest.mark.parametrize("bad", [None, 1.5, True, ("cpu",)])
def test_arguments_that_are_not_devices(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"device\(\)"):
        get_device(bad)
    with pytest.raises(RuntimeError, match="tpu9"):
        get_device("tpu9")


Point = namedtuple("Point", "x y")


class Output(OrderedDict[str, Any]):
    """A class registered with pytree, as Hugging Face's model outputs are."""


_pytree.register_pytree_node(
    Output, lambda o: (list(o.values()), list(o)), lambda v, k: Output(zip(k, v, strict=True))
)


class Batch:
    """Has its own ``to`` method, as Hugging Face's BatchEncoding."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to(self, device: torch.device) -> Batch:
        return Batch(device)


def test_move_to_device_reaches_every_tensor() -> None:
    x = torch.ones(2)
    packed = pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    output = Output(logits=x, name="name")
    data = (x, [x, None], {"k": (x, "text", 3)}, output, packed, Batch(CPU), Point(x, [x]))
    result = move_to_device(data, "meta")
    moved = [result[0], result[1][0], result[2]["k"][0], result[3]["logits"], result[4].data]
    moved += [result[6].x, result[6].y[0]]
    assert {t.device for t in moved} == {META}
    assert result[5].device == META
    assert result[4].batch_sizes.device == CPU
    assert (result[1][1], result[2]["k"][1:], result[3]["name"]) == (None, ("text", 3), "name")
    assert [type(entry) for entry in result] == [type(entry) for entry in data]
    assert x.device == CPU


def test_move_to_device_copies_only_what_must_move() -> None:
    data: Any = (torch.ones(2), [1], {"k": Output(logits=torch.ones(1))})
    assert move_to_device(data, "cpu") is data
    log: list[int] = []
    module = nn.Linear(1, 1)
    result = move_to_device((torch.ones(1), log, module), "meta")
    assert result[1] is log
    assert result[2] is module and module.weight.device == CPU


def test_unsplit_tensors_move_too() -> None:
    marked = NoChunk(torch.ones(2))
    assert move_to_device(marked, "meta").tensor.device == META
    assert move_to_device([marked], "cpu")[0] is marked
