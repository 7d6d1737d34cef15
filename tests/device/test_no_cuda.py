"""Naming a CUDA device that torch cannot use raises an error with the remedy, changing nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipekernels import (
    Communicator,
    Pipe,
    _backend,
    balance,
    move_to_device,
    parallelize_module,
    parallelize_pipeline,
    unparallelize_pipeline,
)
from pipekernels.device.streams import usable
from pipekernels.ops import p2p_copy

X = torch.ones(4, 2)

CALLS: dict[str, Callable[[nn.Sequential, Any], object]] = {
    "Pipe": lambda module, device: Pipe(module, [1, 1], devices=["cpu", device]),
    "parallelize_module": parallelize_module,
    "parallelize_pipeline": lambda module, device: parallelize_pipeline(
        module, {"": "cpu", "1": ("cpu", device)}
    ),
    "unparallelize_pipeline": unparallelize_pipeline,
    "move_to_device": lambda module, device: move_to_device([X], device),
    "p2p_copy": lambda module, device: p2p_copy(X, device),
    "balance_by_time": lambda module, device: balance.balance_by_time(2, module, X, device=device),
    "balance_by_size": lambda module, device: balance.balance_by_size(2, module, X, device=device),
    "empty": lambda module, device: Communicator.threads(1)[0].empty(3, device=device),
}


@pytest.mark.parametrize("device", ["cuda:0", "cuda", torch.device("cuda", 1)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_no_cuda(name: str, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(_backend, "has_cuda", lambda: True)  # The extension has CUDA, not torch.
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    without = "was built without CUDA; install a build for CUDA|not compiled with CUDA|no NVIDIA"
    with pytest.raises(RuntimeError, match=without):
        CALLS[name](module, device)
    assert all(p.device.type == "cpu" for p in module.parameters())
    assert module(X).shape == X.shape


def test_usable_devices() -> None:
    assert usable("cpu") == torch.device("cpu") and usable("meta") == torch.device("meta")
    count = torch.cuda.device_count()
    for device in (f"cuda:{count}", count):
        with pytest.raises(RuntimeError, match="cannot be used: .*|when none is available"):
            usable(device)
