"""The option ``device_blocks`` of communicators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipekernels import Communicator, _backend


@pytest.mark.parametrize(
    ("blocks", "message"), [(0, "at least 1"), (65, "at most 64, got 65"), (2.5, "integer")]
)
def test_invalid_device_blocks(blocks: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"device_blocks .*{message}"):
        Communicator.threads(1, device_blocks=blocks)


@pytest.mark.parametrize("split", [False, True])
def test_device_blocks_arrive(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    made = []

    def own(core: object, device: int, symmetric_bytes: int, blocks: int) -> SimpleNamespace:
        made.append(blocks)
        return SimpleNamespace(close=lambda abort: None, check=None, synchronize=None)

    monkeypatch.setattr(_backend.load(), "CudaCommunicator", own, raising=False)
    monkeypatch.setattr(_backend, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    (comm,) = Communicator.threads(1, device_blocks=5)
    end = comm.split(0) if split else comm
    assert end is not None
    end._device_backend(torch.device("cuda:0"))
    assert made == [5]
