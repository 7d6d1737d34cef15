"""What the launcher hands to the kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow  # Imports Triton.

pytest.importorskip("triton", minversion="3.6")

from pipekernels.triton_kernels import launch as launching


def test_each_stream_and_each_capture_has_its_own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    real, device = torch.zeros, torch.device("cuda", 0)
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: real(count, dtype=dtype))

    def place(stream: int, count: int = 10, capturing: bool = False) -> int:
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream)
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        kept.append(launching._zeros(device, count))
        assert kept[-1].shape == (count,) and not kept[-1].any()
        return kept[-1].data_ptr()

    kept: list[Tensor] = []
    launching._counters.cache_clear()
    assert place(7) == place(7, 20) != place(8)
    captured = {place(7, capturing=True), place(7, capturing=True)}
    assert len(captured | {place(7), place(7, count=1 << 20)}) == 4
    launching._counters.cache_clear()
