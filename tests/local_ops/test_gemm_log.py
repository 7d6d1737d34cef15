"""Why a product on a GPU is left to the vendor's library is logged, once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.kernels.gemm_cases import OnGpu, measured, pretend_gpu

from pipekernels import _log
from pipekernels.comm import links
from pipekernels.kernels.table import Shape
from pipekernels.local_ops import sharded_gemm as module
from pipekernels.tensor_parallel import overlap


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
        assert not module._may_be_triton(x, weight, x.dtype, "auto")
        assert module.choose(x, weight, torch.empty(rows, 64), None, "auto") is None

    pretend_gpu(monkeypatch, None)
    ask()
    pretend_gpu(monkeypatch, measured())
    ask(rows=65)  # In a class that was not measured.
    pretend_gpu(monkeypatch, measured(speedup=1.0))
    ask()
    monkeypatch.setattr(module, "has_triton", lambda: False)
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


def test_of_a_product_that_is_not_overlapped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    shape = Shape("bfloat16", "forward", 4096, 8192, 8192)
    a, b, out = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((4096, 8192), (8192, 8192), (4096, 8192))
    )
    pretend_gpu(monkeypatch, measured(seconds=2e-5, shape=shape))
    assert overlap.choose_overlap(a, b, out, 8, "auto") is None
    links.save("Some GPU", {8: overlap.LINK_MODELS[90]})
    assert overlap.choose_overlap(a, b, out, 8, "auto") is None
    pretend_gpu(monkeypatch, None)
    assert overlap.choose_overlap(a, b, out, 8, "auto") is None
    assert [message.rpartition("other: ")[2] for message in caplog.messages] == [
        "links between so many GPUs were not measured",
        f"no gain is predicted for {shape}",
        "such products were not measured",
    ]
