"""Fixtures shared by all tests."""

import os

# OpenMP reads this when torch is imported. By default its threads spin while they wait, on cores
# that other threads and the ranks of tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from support import LIMIT
from support.pipes import run_apart

from pipekernels import _backend

# Several ranks share one GPU: each of their streams needs a hardware queue of its own. CUDA reads
# this once, when it initializes.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Per rank and communicator. Small, because many ranks of several tests share one GPU.
os.environ.setdefault("PIPEKERNELS_SYMMETRIC_BYTES", str(256 << 20))

# A shell that starts pytest in the background makes it, and its child processes, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARKERS_OF_PROCESSES = ("processes", "native", "compile", "project", "cuda")
# The files that take the longest. A worker of pytest-xdist runs a whole file, as its tests share
# costly fixtures, and the last one to begin should be short.
LONGEST = (
    *("test_plans", "test_aot", "test_stub_driver", "test_sharded_gemm", "test_slab_gemm"),
    *("test_decoding", "test_changed_decoders", "test_derived_plans", "test_equals_the_loop"),
    *("test_adapters", "test_transport", "test_invented_models", "test_emitted_code"),
)


def _cuda_device() -> torch.device:
    if not _backend.has_cuda():
        pytest.skip("the extension was built without CUDA")
    if not torch.backends.cuda.is_built():
        pytest.skip(f"torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit all tests, and let the longest files come first."""
    for item in items:
        item.add_marker(pytest.mark.timeout(LIMIT))
    ranks = {stem: rank for rank, stem in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(autouse=True)
def _usable_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the session if a test breaks the CUDA context: all later CUDA calls would fail."""
    yield
    if request.node.get_closest_marker("cuda") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        broken = f"{request.node.nodeid} has broken the CUDA context: {error}"
        if "PYTEST_XDIST_WORKER" in os.environ:  # pytest-xdist replaces a worker that crashes.
            capture = request.config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                print(broken, file=sys.stderr, flush=True)
            os._exit(3)
        pytest.exit(broken, returncode=3)


@pytest.fixture(autouse=True)
def _no_process_without_a_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that starts a process without a marker for it, so that quick tests stay quick."""
    if any(map(request.node.get_closest_marker, MARKERS_OF_PROCESSES)):
        yield
        return

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail(
            f"{request.node.name} starts a process; give it one of the markers "
            + ", ".join(MARKERS_OF_PROCESSES)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(BaseProcess, "start", refuse)
        patch.setattr(os, "fork", refuse)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, then CUDA; skips with the reason where CUDA is not available."""
    return torch.device(request.param) if request.param != "cuda" else _cuda_device()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One intra-op thread, as operations are small; restores the number after the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["fused", "apart"])
def tasks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether one task runs all stages of a pipe on one device, or each has its own, as on several
    devices."""
    if request.param == "apart":
        run_apart(monkeypatch)
    return request.param


@pytest.fixture(params=["fused", "apart", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of all stages, which is torch's default device during the test: on the CPU, once
    for each of ``tasks``, then on a CUDA device."""
    if request.param == "apart":
        run_apart(monkeypatch)
    if request.param != "cuda":
        return torch.device("cpu")
    device = _cuda_device()
    torch.set_default_device(device)
    request.addfinalizer(lambda: torch.set_default_device(None))
    return device
