"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from support import pipes
from support.clocked_layers import Clock
from support.cuda.graph_cases import CudaRecord
from support.cuda.recorded_graphs import Record, recorded
from support.ranks import run_in_group, run_processes

from pipekernels import _backend
from pipekernels.kernels import table
from pipekernels.pipeline.cuda_graphs import slots as graph_slots
from pipekernels.pipeline.engine.pace import Way
from pipekernels.pipeline.planning import profile

# Several ranks on one GPU need a queue of its own for each of their streams; read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Per rank and communicator; many ranks of several tests are on one GPU at the same time.
os.environ.setdefault("PIPEKERNELS_SYMMETRIC_BYTES", str(256 << 20))

# Ignored, and by what tests start too, where a shell has started them in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARKERS_OF_PROCESSES = ("processes", "native", "compile", "project", "cuda")


def _why_no_cuda() -> str | None:
    if not _backend.has_cuda():
        return "the extension was built without CUDA"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None


@pytest.fixture(autouse=True)
def _usable_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the session after a test that leaves an error on the GPU: such errors come up with some later
    call, and from then on every call fails."""
    yield
    if request.node.get_closest_marker("cuda") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid} has broken the CUDA context: {error}", returncode=3)


@pytest.fixture(autouse=True)
def _no_process_without_a_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that starts a process without a marker that says so: the quick tests stay quick."""
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
    """Each device that operations run on; skips CUDA, saying why, where there is none."""
    if request.param != "cuda":
        return torch.device(request.param)
    reason = _why_no_cuda()
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One intra-op thread, as operations are small; a test may change the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that profiles are made by; :class:`clocked_layers.Work` moves it."""
    clock = Clock()
    monkeypatch.setattr(profile, "perf_counter", clock)
    return clock


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, with nothing known from another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.for_gpu.cache_clear()
    yield tmp_path
    table.for_gpu.cache_clear()


@pytest.fixture
def run_group(tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs ``body(rank, *args)`` on processes whose default group is of the backend ``pipekernels``."""

    def run(
        world_size: int, body: Callable[..., Any], *args: Any, hosts: str = "", **options: Any
    ) -> list[Any]:
        job = (str(tmp_path / "store"), hosts, body, args)
        return run_processes(world_size, run_in_group, *job, **options)

    return run


@pytest.fixture(params=["inline", "threads", "split"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Every way to run a pipe: that of the pipes that :mod:`support.pipes` makes."""
    monkeypatch.setattr(pipes, "execution", request.param)
    return request.param


@pytest.fixture(params=["inline", "threads", "split", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where all stages of a pipe are: on the CPU, for every way to run those that :mod:`support.pipes`
    makes, or on a CUDA device; that is then the device of new tensors and layers."""
    if request.param != "cuda":
        monkeypatch.setattr(pipes, "execution", request.param)
        return torch.device("cpu")
    reason = _why_no_cuda()
    if reason is not None:
        pytest.skip(reason)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_default_device(device)
    request.addfinalizer(lambda: torch.set_default_device(None))
    return device


@pytest.fixture
def record(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Of the CUDA graphs that a test makes; on the CPU they are recorded ones, spoilt when they are idle."""
    if device.type == "cuda":
        yield CudaRecord()
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def spoilt(lease: graph_slots.Lease) -> None:
        slot = lease.slot
        backwards = slot.backwards.values()
        for known in (slot, *backwards):
            known.graph.spoil()  # type: ignore[attr-defined]

    monkeypatch.setattr(graph_slots.Lease, "__del__", spoilt, raising=False)
    try:
        with recorded() as made:
            yield made
    finally:
        torch.set_num_threads(threads)
