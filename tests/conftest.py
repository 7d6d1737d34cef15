"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipekernels import _backend
from pipekernels.pipeline.pace import Pace, Way


def _why_no_cuda() -> str | None:
    if not _backend.has_cuda():
        return "the extension was built without CUDA"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that operations run on; skips CUDA, saying why, where there is none."""
    reason = _why_no_cuda() if request.param == "cuda" else None
    if reason is not None:
        pytest.skip(reason)
    return torch.device(request.param)


@pytest.fixture
def force_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[Way], None]:
    """Makes every pipe run one way, whatever the clock says; lanes where it cannot run split."""

    def force(way: Way) -> None:
        monkeypatch.setattr(Pace, "choose", lambda self, key, ways: way if way in ways else "lanes")
        monkeypatch.setattr(Pace, "is_new", lambda self, key: False)
        monkeypatch.setattr(Pace, "record", lambda self, key, way, seconds: None)

    return force


@pytest.fixture(params=["inline", "lanes", "split"])
def way(request: pytest.FixtureRequest, force_way: Callable[[Way], None]) -> Way:
    """Every way to run a pipe."""
    force_way(request.param)
    return request.param
