"""Collectives on CUDA: set-up, streams, graphs, failures on the device, memory."""

import gc
import os
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.ranks import on, on_ranks, run_processes, run_threads
from torch import Tensor

from pipekernels import Communicator, _backend, ops
from pipekernels.comm import cuda
from pipekernels.comm.process_group import ProcessGroupBackend

on_gpu = pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True
)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The CUDA device, in tests that are ``on_gpu``."""
    return device


def test_unsupported_builds_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    monkeypatch.setattr(_backend, "has_cuda", lambda: False)
    (comm,) = Communicator.threads(1)
    with pytest.raises(RuntimeError, match="reinstall pipekernels where nvcc is found"):
        comm.empty(3, device="cuda")
    assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    monkeypatch.setattr(_backend, "has_cuda", lambda: True)
    monkeypatch.setattr(_backend, "build_info", lambda: {"cuda_architectures": "80-real 90a 100"})
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(RuntimeError, match="torch .* was built without CUDA; install a build"):
        _backend.require_cuda(device)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        _backend.require_cuda(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (9, 0), (12, 1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        _backend.require_cuda(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(RuntimeError, match=r"capability 7\.5, .* begins at 8\.0; .*CUDAARCHS=75"):
        _backend.require_cuda(device)


def test_symmetric_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEKERNELS_SYMMETRIC_BYTES", raising=False)
    assert cuda.symmetric_bytes() == 1 << 30
    monkeypatch.setenv("PIPEKERNELS_SYMMETRIC_BYTES", "4096")
    assert cuda.symmetric_bytes() == 4096
    for wrong in ("", "0", "-1", "1e9", "1 GiB", str(1 << 50)):
        monkeypatch.setenv("PIPEKERNELS_SYMMETRIC_BYTES", wrong)
        with pytest.raises(ValueError, match="must be a positive number of bytes, got"):
            cuda.symmetric_bytes()


def test_where_symmetric_memory_is_full_an_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPEKERNELS_SYMMETRIC_BYTES", "4096")
    pretend_native(monkeypatch)
    nothing: Any = SimpleNamespace(core=None)
    backend = cuda.CudaBackend(nothing, torch.device("cuda:3"))
    monkeypatch.setattr(backend, "_allocate", lambda *_: None)
    with pytest.raises(RuntimeError) as raised:
        backend.empty(torch.Size((3, 1024)), torch.bfloat16)
    assert str(raised.value) == (
        "no room for 6144 bytes of symmetric memory on cuda:3; drop symmetric tensors that are no "
        "longer needed, free device memory, or set PIPEKERNELS_SYMMETRIC_BYTES to more than 4096"
    )


def pretend_native(
    monkeypatch: pytest.MonkeyPatch, broken_links: str = "", has_slow_links: bool = False
) -> list[Any]:
    """Replaces communicators of the extension on CUDA; returns their devices and thread blocks."""
    made: list[Any] = []

    def native(
        core: object, device: int, symmetric_bytes: int, blocks: int, parent: object
    ) -> SimpleNamespace:
        made.append((device, blocks))
        return SimpleNamespace(
            parent=parent,
            close=lambda abort: made.append("aborted" if abort else "closed"),
            check=lambda: None, synchronize=None,
            broken_links=broken_links, has_slow_links=has_slow_links,
        )  # fmt: skip

    monkeypatch.setattr(_backend.load(), "CudaCommunicator", native, raising=False)
    monkeypatch.setattr(_backend, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("broken", ["", "ranks 0 and 2"])
def test_nccl_takes_over_where_links_are_broken_or_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str, backend: str
) -> None:
    made = pretend_native(monkeypatch, broken, has_slow_links=True)
    monkeypatch.setattr(cuda, "backends_of", lambda group: {"cuda": backend})
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    nothing: Any = SimpleNamespace(core=None)
    own, group = partial(cuda.CudaBackend, nothing, blocks=5), cast(Any, object())
    for given in (group, None):
        make = partial(cuda.over_links, own, given, torch.device("cuda:0"), None)
        if given is group and backend == "nccl":
            taken = make()
            assert isinstance(taken, ProcessGroupBackend) and taken._group is group
            taken.device = torch.device("cpu")
            assert taken.empty(torch.Size((2,)), torch.int64).shape == (2,)  # On one host.
            assert made[:2] == [(0, 5), "closed"]
            reason = f"{broken} do not get" if broken else "NVLink does not join all GPUs"
            assert caplog.messages[0].startswith(reason)
            assert caplog.messages[0].endswith(": collectives on CUDA run on NCCL")
        elif broken:
            with pytest.raises(RuntimeError, match="ranks 0 and 2 do not get .*; turn off the IOM"):
                make()
            assert made[-1] == "closed"
        else:
            assert isinstance(make(), cuda.CudaBackend)


@pytest.mark.parametrize(
    ("blocks", "message"), [(0, "at least 1"), (65, "at most 64, got 65"), (2.5, "integer")]
)
def test_invalid_device_blocks(blocks: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"device_blocks .*{message}"):
        Communicator.threads(1, device_blocks=blocks)


@pytest.mark.parametrize("split", [False, True])
def test_device_blocks_arrive(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    made = pretend_native(monkeypatch)
    (comm,) = Communicator.threads(1, device_blocks=5)
    own = comm.split(0) if split else comm
    own._device_backend(torch.device("cuda:0"))
    assert made == [(0, 5)]
    del comm, own
    gc.collect()
    assert made == [(0, 5), "closed"]


@on_gpu
@on_ranks(2, run_threads, run_processes)
def test_using_and_closing_a_child(comm: Communicator, gpu: torch.device) -> None:
    child = comm.split(0)
    x = child.empty(1000, device=gpu)
    assert child.all_reduce(x.fill_(1)).eq(comm.world_size).all()
    assert child.all_reduce(torch.ones(2)).tolist() == [comm.world_size] * 2  # And on the CPU.
    # Too large for the symmetric memory: an ordinary tensor.
    shape = (cuda.symmetric_bytes() // 8 + 1,)
    assert child.output(shape, torch.empty(0, dtype=torch.float64, device=gpu)).shape == shape
    with pytest.raises(ValueError, match="is on cuda:0, but the tensor on cuda:7"):
        child.empty(1, device="cuda:7")
    child.synchronize()
    child.close()
    assert x.eq(comm.world_size).all()  # Its memory stays valid after close().


def set_allocator(rank: int, value: str) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = value


@on_gpu
@on_ranks(2, prepare=(set_allocator, "expandable_segments:True"))
def test_expandable_segments(comm: Communicator, gpu: torch.device) -> None:
    """Torch cannot export an IPC handle for such memory."""
    x, y = torch.ones(1 << 20, device=gpu), torch.full((1 << 20,), 2.0, device=gpu)
    assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    assert comm.all_reduce(x).eq(comm.world_size).all()
    rows = comm.all_gather(y)
    assert comm.reduce_scatter(rows).eq(2 * comm.world_size).all()


@on_gpu
def test_threads_in_one_stream_raise(gpu: torch.device) -> None:
    shared = torch.cuda.Stream(gpu)
    message = "ranks 0 and 1 .* same CUDA stream"

    def on_rank(comm: Communicator) -> None:
        x = torch.ones(5, device=gpu)
        for stream in (torch.cuda.default_stream(gpu), shared):
            with torch.cuda.stream(stream), pytest.raises(ValueError, match=message):
                comm.all_reduce(x)
        own = torch.cuda.Stream(gpu)
        own.wait_stream(torch.cuda.default_stream(gpu))
        with torch.cuda.stream(own):
            assert comm.all_reduce(x).tolist() == [3.0] * 5

    run_threads(3, on_rank)


@on_gpu
@on_ranks(2, run_threads, run_processes)
def test_a_rank_may_change_its_stream(comm: Communicator, gpu: torch.device) -> None:
    """The collectives of a rank stay in order, in whichever stream each of them is."""
    streams = [torch.cuda.Stream(gpu) for _ in range(3)]
    generator = random.Random(5)
    x = torch.ones(1 << 20, device=gpu, dtype=torch.int64)
    torch.cuda.current_stream().synchronize()
    for _ in range(30):
        with torch.cuda.stream(generator.choice(streams)):
            comm.all_reduce(x, "max")
            comm.all_reduce(x.clone())
    comm.synchronize()
    assert x.eq(1).all()


@on_gpu
@on_ranks(2)
def test_captured_and_replayed(comm: Communicator, gpu: torch.device) -> None:
    """A graph of collectives of several kinds, between calls that are not captured."""
    me, n = comm.rank, comm.world_size
    x, symmetric = torch.empty(70_001, device=gpu), comm.empty(5000, device=gpu)
    rows = torch.empty(4 * n, 33, device=gpu)

    def step() -> list[Tensor]:
        return [
            comm.all_reduce(x),
            comm.all_reduce(x, algorithm="ring"),
            comm.all_reduce(symmetric, algorithm="two_shot"),
            comm.reduce_scatter(rows),
            comm.all_gather(rows),
            ops.all_reduce(ops.all_reduce(rows, comm), comm),
        ]

    def fill(value: int) -> None:
        x.fill_(value + me)
        symmetric.fill_(value - me)
        rows.fill_(value * (me + 1))

    ranks = range(n)
    fill(0)
    step()  # Sets up the communicator and loads the kernels.
    comm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
        results = step()
    for value in (1, 5, 2):
        fill(value)
        comm.barrier()
        graph.replay()
        torch.cuda.current_stream().synchronize()
        comm.synchronize()
        total = sum(value * (rank + 1) for rank in ranks)
        assert results[1].eq(n * sum(value + rank for rank in ranks)).all()
        assert results[2].eq(sum(value - rank for rank in ranks)).all()
        assert results[3].eq(total).all() and results[5].eq(n * total).all()
        parts = torch.tensor([value * (rank + 1.0) for rank in ranks], device=gpu)
        assert results[4].eq(parts.repeat_interleave(4 * n)[:, None]).all()
        assert comm.all_reduce(torch.ones(3, device=gpu)).tolist() == [n] * 3
    comm.barrier()


@on_gpu
def test_the_first_call_cannot_be_captured(gpu: torch.device) -> None:
    (comm,) = Communicator.threads(1)
    x = torch.ones(3, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="call one before the capture"):
            comm.reduce_scatter(x)
        x.add_(1)
    comm.reduce_scatter(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match="allocate it before"):
            comm.empty(3, device=gpu)
        x.add_(1)


def is_usable(gpu: torch.device) -> bool:
    return int(torch.arange(1000, device=gpu).sum()) == 499_500


@on_gpu
@on_ranks(2)
def test_a_late_process_is_named_and_the_context_stays_usable(
    comm: Communicator, gpu: torch.device
) -> None:
    x = torch.ones(1 << 18, device=gpu)
    comm.all_reduce(x)  # Initializes CUDA on all ranks, which may take more than 3 s.
    comm.synchronize()
    with Communicator.from_process_group(timeout=3.0) as hasty:
        hasty.all_reduce(x)
        hasty.synchronize()
        if hasty.rank == 0:
            hasty.all_reduce(x)
            with pytest.raises(TimeoutError, match="rank 1 of 2 did not arrive at .*in 3 s"):
                hasty.synchronize()
            assert x.isnan().all()
            with pytest.raises(RuntimeError, match="cannot be used after a failure"):
                hasty.all_reduce(x)
        comm.barrier()
    assert comm.all_reduce(x.fill_(1)).eq(2).all()


def call_differently(comm: Communicator, gpu: torch.device) -> None:
    x = torch.ones(12, device=gpu)
    comm.all_reduce(x)
    comm.synchronize()
    with pytest.raises(ValueError, match="the ranks call different collectives: rank 0 .*rank 1 "):
        comm.all_reduce(x if comm.rank else x[:5])
        comm.synchronize()
    with pytest.raises(RuntimeError, match="cannot be used after a failure"):
        comm.barrier()
    assert is_usable(gpu)


@pytest.mark.processes
@on_gpu
def test_processes_that_call_different_collectives_raise(gpu: torch.device) -> None:
    run_processes(2, call_differently, gpu)


@on_gpu
def test_collected_communicators_leak_no_thread_and_no_memory(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes 32 communicators that begin with 1/16 of the GPU's memory, and closes none."""
    memory = torch.cuda.mem_get_info(gpu)[1]
    monkeypatch.setenv("PIPEKERNELS_SYMMETRIC_BYTES", str(memory))

    def on_rank(comm: Communicator) -> None:
        for _ in range(4):
            child = comm.split(0)
            assert child.all_reduce(torch.ones(3, device=gpu)).tolist() == [2.0] * 3
            comm.barrier()  # Before any rank drops one that the other may still need.
            del child
            comm.barrier()

    run_threads(2, on(gpu, on_rank))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        run_threads(2, on(gpu, on_rank))
    assert len(os.listdir("/proc/self/task")) <= threads
