"""Communicators over several hosts on CUDA tensors: faked devices and NCCL, then a real GPU."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cuda.pretended_cuda import CPU, PretendedDevice, PretendedNccl, pretend, use_pretended
from support.devices import on
from support.ranks import run_processes
from test_hosts import (
    call_differently,
    check_sums,
    move_everything,
    on_host,
    random_sums,
    reduce_everything,
    use_everything,
)

from pipekernels import Communicator, PeerError
from pipekernels.comm.end import ReadyCounters
from pipekernels.comm.hosts import memory, nccl_link
from pipekernels.comm.hosts.link import LinkError

pytestmark = pytest.mark.full


def run_pretended(
    layout: str, backend: str, body: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """As :func:`test_hosts.run_hosts`, with faked CUDA devices."""
    arguments = (layout, backend, body, args)
    return run_processes(len(layout), on_pretended, *arguments, **options)


def on_pretended(
    alone: Communicator, layout: str, backend: str, body: Callable[..., Any], args: Any
) -> Any:
    pretend(layout, backend)
    return on_host(alone, layout, body, args)


def with_device(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    use_pretended(comm)
    return body(comm, *args)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "backend"), [("abab", "gloo"), ("aaab", "nccl")])
def test_reductions(layout: str, backend: str) -> None:
    run_pretended(layout, backend, with_device, reduce_everything)


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "backend"), [("aaab", "gloo"), ("abcc", "nccl")])
def test_gathers_and_broadcasts(layout: str, backend: str) -> None:
    run_pretended(layout, backend, with_device, move_everything)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_all_ranks(dtype: torch.dtype) -> None:
    check_sums(run_pretended("abca", "nccl", with_device, random_sums, dtype), dtype)


def reduce_when_ready(comm: Communicator) -> list[str]:
    device = use_pretended(comm)
    ready = ReadyCounters(torch.zeros(201, dtype=torch.int32), target=7, block_rows=5)
    for op in ("sum", "avg", "max"):
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(1001, generator=generator)
        expected = comm.all_reduce(x.clone(), op)
        device.all_reduce_when_ready(x, op, ready, 4)
        assert x.equal(expected)
    return PretendedDevice.made[-1].calls[-5:]


@pytest.mark.processes
def test_reduced_inside_each_host_while_it_is_written() -> None:
    """The device gets the counters unchanged; the bits are those of all_reduce."""
    for calls in run_pretended("abab", "nccl", reduce_when_ready):
        # The gathers return the parts reduced over hosts, and the status of all ranks.
        assert calls == ["(7, 5, 4)", "all_reduce"] + ["all_gather"] * 3


def use_in_modes(comm: Communicator) -> None:
    """The modes at the first use must not matter."""
    x = torch.ones(3)
    with torch.inference_mode(), torch.device("meta"):
        use_pretended(comm)
        assert comm.all_reduce(x.cpu()).cpu().tolist() == [4.0] * 3
    use_everything(comm)


@pytest.mark.processes
def test_in_other_modes_and_in_layers() -> None:
    run_pretended("abab", "nccl", use_in_modes)


def use_cpu_and_cuda(comm: Communicator) -> None:
    """CPU and CUDA tensors in turn, captures, split, fork and close."""
    assert comm.empty(2, 3, device="cuda").shape == (2, 3)  # The first use of CUDA.
    x = torch.ones(5)
    assert comm.all_reduce(x).tolist() == [4.0] * 5
    use_pretended(comm)
    assert comm.all_reduce(x).tolist() == [16.0] * 5
    comm.barrier()
    comm.synchronize()
    torch.cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(RuntimeError, match="cannot be captured in a graph"):
        comm.all_reduce(x)
    torch.cuda.is_current_stream_capturing = lambda: False
    with pytest.raises(ValueError, match=r"src must be a rank in 0..3, got 4"):
        comm.broadcast(x, 4)
    pair = comm.split(comm.rank // 2)  # It uses the same backend.
    use_pretended(pair)
    assert pair.all_reduce(x).tolist() == [32.0] * 5
    pair.close()
    child = os.fork()
    if child == 0:  # It must not shut down the parent's NCCL group.
        with contextlib.suppress(BaseException):
            comm.close()
            os._exit(any(group.ended == "shut down" for group in PretendedNccl.made[:1]))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert comm.all_reduce(x.fill_(1)).tolist() == [4.0] * 5
    comm.close()
    assert [device.closed for device in PretendedDevice.made] == ["closed"] * 2
    assert [group.ended for group in PretendedNccl.made] == ["shut down"] * 2
    assert not memory._in_use
    with pytest.raises(RuntimeError, match="closed"):
        comm.all_reduce(x)


@pytest.mark.processes
def test_cpu_and_cuda_tensors_in_turn() -> None:
    run_pretended("abab", "nccl", use_cpu_and_cuda)


# ---- errors --------------------------------------------------------------------------------------


def call_differently_on_cuda(comm: Communicator) -> None:
    end = comm._host_end
    use_pretended(comm)
    call_differently(comm)
    x = torch.ones(3)
    with pytest.raises(
        ValueError,
        match=r"rank 0 all_reduce\(3 x float32 on cuda, .* rank 3 all_reduce\(3 x float32, ",
    ):
        (end if comm.rank == 3 else comm._host_end).all_reduce(x, "sum", "auto")
    assert comm.all_reduce(x.fill_(1)).tolist() == [4.0] * 3


@pytest.mark.processes
def test_different_calls_raise_on_all_ranks_and_the_communicator_stays_usable() -> None:
    run_pretended("aabb", "nccl", call_differently_on_cuda)


def fail_to_set_up(comm: Communicator, backend: str) -> None:
    def set_up() -> str:
        with pytest.raises(RuntimeError, match="cannot use CUDA over several hosts: ") as caught:
            comm.empty(1, device="cuda")
        assert comm.all_reduce(torch.ones(1)).item() == comm.world_size  # The CPU still works.
        return str(caught.value)

    if not backend:
        assert "has none; make the communicator from a group that was initialised with" in set_up()
        return
    PretendedDevice.problem = "no such GPU" if comm.rank >= 2 else ""
    assert set_up().endswith("hosts: rank 2: no such GPU")
    PretendedDevice.problem = ""
    PretendedNccl.stuck_at = 0 if comm.rank == 0 else -1
    assert "rank 0: NCCL has not connected the hosts within 1.5 s" in set_up()
    assert [device.closed for device in PretendedDevice.made] == ["closed"] * (1 + (comm.rank < 2))
    PretendedNccl.stuck_at = -1
    with pytest.raises(ValueError, match=r"rank 0 barrier\(\), rank 1 first use of CUDA, "):
        comm.empty(1, device="cuda") if comm.rank else comm.barrier()
    use_pretended(comm)  # Now it works.
    assert comm.all_reduce(torch.ones(1)).item() == 4


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["", "nccl"])
def test_a_rank_that_cannot_take_part_is_reported_on_all(backend: str) -> None:
    run_pretended("aabb", backend, fail_to_set_up, backend, timeout=2.0)


def fail_in_a_collective(comm: Communicator, trouble: str, victim: int) -> tuple[str, int | None]:
    """Let the device or link of ``victim`` fail; returns the error of the next synchronization.

    The failed collective must not return partial sums: all bytes of its result are 0xFF.
    """
    PretendedNccl.stuck_at = 1 if trouble == "link" and comm.rank == victim else -1
    device = use_pretended(comm)  # A link's first operation is part of the set-up.
    if trouble == "device" and comm.rank == victim:
        device._local.fails = True
    assert comm.all_reduce(torch.ones(3, dtype=torch.int64)).tolist() == [-1] * 3
    started = time.monotonic()
    with pytest.raises((PeerError, TimeoutError)) as caught:
        comm.synchronize()
    message, rank = (
        f"{type(caught.value).__name__}: {caught.value}",
        getattr(caught.value, "rank", None),
    )
    del caught
    for call in (comm.barrier, comm.synchronize, lambda: comm.all_reduce(torch.ones(1))):
        with pytest.raises(RuntimeError, match="cannot be used after a failure"):
            call()
    comm.close()
    assert time.monotonic() - started < 20  # Well before the timeout of NCCL's connections, 60 s.
    assert [group.ended for group in PretendedNccl.made] == ["aborted"] * len(PretendedNccl.made)
    assert not memory._in_use
    return message, rank


@pytest.mark.processes
def test_a_stuck_link_is_aborted_and_delivers_no_partial_sums() -> None:
    results = run_pretended("aabb", "nccl", fail_in_a_collective, "link", 2, timeout=2.0)
    for rank in (0, 2):  # The members of the link.
        assert "TimeoutError: a rank of another host did not arrive in time" in results[rank][0]
        assert results[rank][0].endswith("in an earlier collective on cpu")
    for rank in (1, 3):
        assert results[rank][0].startswith(("PeerError: ", "TimeoutError: "))


@pytest.mark.processes
def test_a_failing_device_delivers_no_partial_sums() -> None:
    results = run_pretended("aabb", "nccl", fail_in_a_collective, "device", 3)
    for message, rank in results[:2]:
        assert message.startswith("PeerError: a rank of another host is gone") and rank is None
    assert results[2][1] == 3 and "rank 1 gave up" in results[2][0]
    assert "(0 is rank 2, 1 is rank 3): rank 0 is pretended to have died" in results[3][0]


def survive_a_killed_rank(comm: Communicator) -> None:
    use_pretended(comm)
    comm.all_reduce(torch.ones(3))
    comm.barrier()
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError):
        while True:
            comm.all_reduce(torch.ones(3))
    with pytest.raises(PeerError, match="cannot be used after a failure"):
        comm.barrier()


@pytest.mark.processes
def test_a_killed_rank_is_noticed_on_all_hosts() -> None:
    run_pretended("aabb", "nccl", survive_a_killed_rank, killed=(3,), timeout=60.0)


# ---- a link over NCCL ----------------------------------------------------------------------------


class Group:
    """A fake ProcessGroupNCCL of one rank; its operations end when ``done`` is set."""

    def __init__(self) -> None:
        self.error = ""
        self.hangs = threading.Event()
        self.done = threading.Event()
        self.done.set()
        self.ended: list[str] = []

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        return self

    def synchronize(self) -> None:
        self.done.wait(30)

    def abort(self) -> None:
        self.ended.append("aborted")
        self.hangs.set()
        self.done.set()

    def shutdown(self) -> None:
        self.ended.append("shut down")
        if not self.done.is_set():
            self.hangs.wait(30)


@pytest.mark.slow
def test_a_late_operation_is_aborted_and_its_result_overwritten() -> None:
    group, x = Group(), torch.ones(3)
    link = nccl_link.NcclLink(group, CPU, 1.0)
    for _ in range(3):
        link.sum(x)
    time.sleep(1.5)  # Longer than the timeout, but no operation is pending.
    assert link.is_at() == (3, 3) and x.tolist() == [1.0] * 3
    link.check()
    group.done.clear()
    link.sum(x)
    assert x.isnan().all() and x.view(torch.int32).eq(-1).all()
    with pytest.raises(LinkError, match="did not arrive in time"):
        link.check()
    link.close()
    assert group.ended == ["aborted"]
    with pytest.raises(RuntimeError, match="has been closed"):
        link.sum(x)


def test_an_error_of_nccl_becomes_an_error_of_the_link() -> None:
    group = Group()
    link = nccl_link.NcclLink(group, CPU, 30.0)
    group.error = "unhandled system error"
    with pytest.raises(LinkError, match=r"is gone \(unhandled system error\)"):
        link.sum(torch.ones(3))
    link.abort()
    with pytest.raises(LinkError, match="NCCL has failed"):
        link.check()
    link.close()
    assert group.ended == ["aborted"] and not memory._in_use


@pytest.mark.slow
def test_a_group_that_does_not_shut_down_is_aborted() -> None:
    group = Group()
    link = nccl_link.NcclLink(group, CPU, 1.0)
    group.done.clear()
    link.close()
    assert group.ended == ["shut down", "aborted"]


def test_the_watching_thread_ends_when_its_link_is_collected() -> None:
    before = set(threading.enumerate())
    link = nccl_link.NcclLink(Group(), CPU, 30.0)
    (watching,) = set(threading.enumerate()) - before
    gone = weakref.ref(link)
    del link
    watching.join(20)
    assert not watching.is_alive() and gone() is None
    assert len(memory._in_use) == 3  # Kept, as a kernel may still write there.
    memory._in_use.clear()


@pytest.mark.slow
def test_connections_that_fail_or_take_too_long_raise() -> None:
    group = Group()
    group.error = "no route to host"
    with pytest.raises(RuntimeError, match="NCCL cannot connect cpu: no route to host"):
        nccl_link.connect(group, CPU, 30.0)
    assert group.ended == ["aborted"]
    group = Group()
    group.done.clear()
    with pytest.raises(RuntimeError, match="not connected the hosts within 1.5 s"):
        nccl_link.connect(group, CPU, 2.0)
    group.done.set()


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_BLOCKING_WAIT"
    for before in (None, "0"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        with pytest.raises(KeyError), nccl_link._blocking_wait():
            assert os.environ[name] == "1"
            raise KeyError
        assert os.environ.get(name) == before


def test_torch_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch .* was built without NCCL"):
        nccl_link.connect_nccl(dist.HashStore(), 0, 1, CPU, 1.0)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_torch_has_the_nccl_functions_that_a_link_uses() -> None:
    group = dist.ProcessGroupNCCL
    assert isinstance(group.Options()._timeout, datetime.timedelta)
    for name in ("size", "allreduce", "_allgather_base", "broadcast", "abort"):
        assert callable(getattr(group, name))
    assert hasattr(group, "shutdown") or hasattr(group, "_shutdown")
    assert hasattr(dist.Work, "synchronize")


# ---- on a GPU ------------------------------------------------------------------------------------


on_gpu = pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True
)


def on_real_device(
    alone: Communicator, layout: str, backend: str, device: torch.device, body: Any, args: Any
) -> Any:
    host = layout[alone.rank]
    # Let NCCL believe that the ranks are on different hosts, so that they may share one GPU.
    os.environ |= {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # Required as well from NCCL 2.30.3 on.
    config = f"cpu:gloo,cuda:{backend}"
    dist.get_backend_config = lambda group=None: config
    return on_host(alone, layout, body, (*args, device))


def run_on_gpu(
    layout: str, backend: str, device: torch.device, body: Any, *args: Any, **options: Any
) -> list[Any]:
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    arguments = (layout, backend, device, body, args)
    return run_processes(len(layout), on_real_device, *arguments, limit=110.0, **options)


@pytest.mark.processes
@on_gpu
@pytest.mark.parametrize(("layout", "backend"), [("aaab", "gloo"), ("aabb", "nccl")])
def test_everything_on_a_gpu(layout: str, backend: str, device: torch.device) -> None:
    run_on_gpu(layout, backend, device, on(device, everything))


def everything(comm: Communicator, device: torch.device) -> None:
    reduce_everything(comm, device)
    move_everything(comm, device)
    torch.cuda.current_stream().synchronize()
    comm.synchronize()
    for dtype in (torch.float32, torch.bfloat16):
        sums = torch.tensor(random_sums(comm, dtype, device))
        check_sums(list(comm.all_gather(sums[None]).tolist()), dtype)
    x = torch.ones(1000, 7, device=device)
    ready = torch.full((10,), 3, dtype=torch.int32, device=device)
    assert comm.all_reduce_when_ready(x, ready, 3, 100).eq(comm.world_size).all()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        comm.all_reduce(x)
    assert comm.all_reduce(torch.ones(1 << 20, device=device)).eq(4).all()  # Runs after it.
    torch.cuda.current_stream().wait_stream(side)
    assert x.eq(16).all()


def lose_a_rank_on_gpu(comm: Communicator, device: torch.device) -> None:
    x = torch.ones(1 << 18, device=device)
    comm.all_reduce(x)
    comm.synchronize()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError):
        while True:
            comm.all_reduce(x)
            torch.cuda.current_stream().synchronize()
    comm.close()
    assert int(torch.arange(1000, device=device).sum()) == 499_500


@pytest.mark.processes
@on_gpu
def test_a_killed_rank_is_noticed_on_a_gpu(device: torch.device) -> None:
    run_on_gpu("ab", "nccl", device, lose_a_rank_on_gpu, killed=(1,), timeout=20.0)


def be_late_on_gpu(comm: Communicator, device: torch.device) -> None:
    """One device reaches the collective only after the other has given up."""
    x = torch.ones(1 << 18, device=device)
    comm.all_reduce(x)
    comm.synchronize()
    if comm.rank == 1:
        torch.cuda._sleep(int(4e10))  # Clock cycles: 20 s.
    comm.all_reduce(x)
    with pytest.raises((TimeoutError, PeerError)):
        comm.synchronize()
    assert x.isnan().all()
    comm.close()
    assert int(torch.arange(1000, device=device).sum()) == 499_500


@pytest.mark.processes
@on_gpu
def test_a_late_device_times_out_and_the_context_stays_usable(device: torch.device) -> None:
    run_on_gpu("ab", "nccl", device, be_late_on_gpu, timeout=15.0)
