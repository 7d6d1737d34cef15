"""Why a product on a GPU is left to the vendor's library is logged, once."""

import logging

import pytest
import torch
from support.kernels.gemm_cases import OnGpu, measured, pretend_gpu

from pipekernels import _log
from pipekernels.local_ops import gemm_choice
from pipekernels.local_ops.gemm_choice import choose


@pytest.fixture(autouse=True)
def _nothing_is_logged_yet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_log, "_seen", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    caplog.set_level(logging.INFO, "pipekernels")


def test_of_a_product(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(rows: int = 64) -> None:
        x = torch.empty(rows, 64, dtype=torch.bfloat16).as_subclass(OnGpu)
        weight = torch.empty(64, 64, dtype=torch.bfloat16).as_subclass(OnGpu)
        assert choose(x, weight, None) is None
        assert choose(x, weight, torch.empty(rows, 64)) is None

    pretend_gpu(monkeypatch, None)
    ask()
    pretend_gpu(monkeypatch, measured())
    ask(rows=65)  # In a class that was not measured.
    pretend_gpu(monkeypatch, measured(speedup=1.0))
    ask()
    monkeypatch.setattr(gemm_choice, "has_triton", lambda: False)
    ask()
    reasons = [
        "nothing was measured on this GPU; `pipekernels tune` does",
        "such products were not measured",
        "the library was as fast for Shape(",
        "the kernel needs Triton 3.6 or newer",
    ]
    start = "sharded_gemm on Some GPU is the vendor's library: "
    assert len(caplog.messages) == len(reasons)
    for message, why in zip(caplog.messages, reasons, strict=True):
        assert message.startswith(start + why)
