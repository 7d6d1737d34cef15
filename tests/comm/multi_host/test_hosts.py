"""Communicators over several hosts; the hosts are processes with different PIPEKERNELS_HOST_IDs."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import TIMEOUT
from support.levels import in_gate
from support.ranks import as_test, leakable_resources, leaves_the_group, run_processes
from support.sweeps.collectives import Call, make
from torch import nn

from pipekernels import Communicator, PeerError, RowParallelLinear, ops

pytestmark = pytest.mark.processes

LAYOUTS = ["aabb", "abab", "aaab", "abcc"]


def run_hosts(layout: str, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run ``body(communicator, *args)`` on a process per letter of ``layout``, its host."""
    return run_processes(len(layout), on_host, layout, body, args, **options)


def on_hosts(layout: str, **options: Any) -> Callable[[Callable[..., object]], Any]:
    """Make a test of ``body(communicator, *others)``, see :func:`as_test`, by :func:`run_hosts`."""
    return partial(as_test, partial(run_hosts, layout, **options))


def on_host(alone: Communicator, layout: str, body: Callable[..., Any], args: Any) -> Any:
    os.environ["PIPEKERNELS_HOST_ID"] = layout[alone.rank]
    with Communicator.from_process_group(timeout=alone.timeout) as comm:
        return body(comm, *args)


def random_calls(comm: Communicator) -> None:
    """Of the table, with numbers whose sums are exact in the order of any number of hosts."""
    for seed in range(80):
        make(comm, Call.draw(seed, comm.world_size, 3000).anywhere())


def refuse(comm: Communicator) -> None:
    whole = torch.ones(comm.world_size)
    for call in (comm.all_reduce, comm.reduce_scatter):
        with pytest.raises(ValueError, match=r"on one host, .* use order='rank', or split\(\)"):
            call(whole, order="tree")
        call(whole, "max", order="tree")  # The same in every order.
        call(whole.long(), order="tree")
    with pytest.raises(ValueError, match="average of int64"):
        comm.all_reduce(torch.ones(1, dtype=torch.int64), "avg")
    with pytest.raises(ValueError, match=r"src must be a rank in 0..3, got 4"):
        comm.broadcast(whole, 4)


@pytest.mark.parametrize("body", [random_calls, refuse])
@pytest.mark.parametrize("layout", in_gate(["aabb", "abcc"], LAYOUTS))
def test_collectives(layout: str, body: Callable[[Communicator], None]) -> None:
    run_hosts(layout, body)


def random_sums(comm: Communicator, dtype: torch.dtype) -> list[list[float]]:
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(4099, generator=generator).to(dtype)
    sums = [x, comm.all_reduce(x.clone()), comm.all_reduce(x.clone(), "avg")]
    return [tensor.tolist() for tensor in sums]


@pytest.mark.parametrize(("layout", "order"), [("aaab", [0, 1, 2, 3]), ("abaa", [0, 2, 3, 1])])
def test_order_of_summation(layout: str, order: list[int]) -> None:
    """Sums are by rank inside each host, then over hosts: with two hosts that fixes the bits."""
    results = [torch.tensor(sums) for sums in run_hosts(layout, random_sums, torch.float32)]
    a, b, c, d = [results[rank][0] for rank in order]
    for _, total, average in results:
        assert total.equal(((a + b) + c) + d)
        assert average.equal((((a + b) + c) + d) / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_all_ranks(dtype: torch.dtype) -> None:
    sums = run_hosts("abca", random_sums, dtype)
    results = [torch.tensor(tensors).double() for tensors in sums]
    rows = torch.stack([x for x, _, _ in results])
    # One rounding per sum, and one per conversion of a float32 sum to 16 bits.
    bound = ((1 + torch.finfo(dtype).eps / 2) ** 4 - 1) * rows.abs().sum(0)
    for _, total, _ in results:
        assert total.equal(results[0][1])
        assert (total - rows.sum(0)).abs().le(bound).all()


@on_hosts("abab")
def test_symmetric_tensors_layers_and_operations(comm: Communicator) -> None:
    assert Communicator.from_handle(comm.handle) is comm
    assert (comm.world_size, comm.timeout) == (4, TIMEOUT)
    x = torch.ones(3)
    with torch.device("meta"):  # The default device must not affect the communicator.
        assert comm.all_reduce(x).cpu().tolist() == [4.0] * 3
        assert comm.all_gather(x[:1]).tolist() == [4.0] * 4
        comm.split(0).close()
    symmetric = comm.empty(100, dtype=torch.float64).fill_(comm.rank)
    assert comm.all_reduce(symmetric).eq(6).all()
    comm.barrier()

    torch.manual_seed(0)
    full, x = nn.Linear(10, 6), torch.randn(5, 10)
    for reduce in ("all_reduce", "reduce_scatter"):
        layer = RowParallelLinear.from_linear(full, comm, input_is_parallel=False, reduce=reduce)
        rows = torch.cat([x, x[:3]])
        y, expected = layer(rows), full(rows)
        if reduce == "reduce_scatter":
            expected = expected.chunk(4)[comm.rank]
        torch.testing.assert_close(y, expected)
    state = layer.full_state_dict()
    assert all(state[name].equal(value) for name, value in full.state_dict().items())

    leaf = torch.ones(3, requires_grad=True)
    (ops.all_reduce(leaf, comm) * (comm.rank + 1)).sum().backward()
    assert leaf.grad.tolist() == [10.0] * 3


@leaves_the_group
@on_hosts("abab")
def test_split(comm: Communicator) -> None:
    dist.destroy_process_group()  # split() must not need it.
    pair = comm.split(comm.rank // 2, key=-comm.rank)  # Two hosts: ranks 1, 0 and 3, 2.
    inside = comm.split(comm.rank % 2)  # One host each.
    first_only = comm.split(None if comm.rank else 7)
    with pair, inside:
        answers = [pair.rank, pair.all_gather(torch.tensor([comm.rank])).tolist()]
        answers += [inside.rank, inside.all_gather(torch.tensor([comm.rank])).tolist()]
        if first_only is not None:
            answers.append(first_only.all_reduce(torch.ones(1)).item())
        again = pair.split(0)
        answers.append(again.all_gather(torch.tensor([comm.rank])).tolist())
        again.close()
    comm.barrier()
    assert (
        answers
        == [
            [1, [1, 0], 0, [0, 2], 1.0, [1, 0]],
            [0, [1, 0], 0, [1, 3], [1, 0]],
            [1, [3, 2], 1, [0, 2], [3, 2]],
            [0, [3, 2], 1, [1, 3], [3, 2]],
        ][comm.rank]
    )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_hosts("aabb")
def test_close_leaks_nothing(comm: Communicator) -> None:
    before, open_before = leakable_resources(), descriptors()
    for _ in range(2):
        with Communicator.from_process_group() as other:
            x = other.all_reduce(other.empty(1000).fill_(1))
            assert len(leakable_resources()) > len(before)
        with pytest.raises(RuntimeError, match="closed"):
            other.barrier()
        assert x.eq(4).all()  # Its memory stays valid after close().
        del x
        assert leakable_resources() == before
        while descriptors() > open_before:  # Gloo closes its sockets on another thread.
            time.sleep(0.01)
        assert descriptors() == open_before
    comm.barrier()


@on_hosts("aabb")
def test_different_calls_raise_on_all_ranks_and_the_communicator_stays_usable(
    comm: Communicator,
) -> None:
    odd, x = comm.rank == 3, torch.ones(8)
    for call, message in [
        (lambda: comm.all_reduce(x[: 7 + odd]),
         r"rank 0 all_reduce\(7 x float32.*, sum, auto\), .* rank 3 all_reduce\(8"),
        (lambda: comm.all_reduce(x, "max" if odd else "sum"), "sum, auto.* max, auto"),
        (lambda: comm.all_reduce(x.view(2, 4) if odd else x), "but of different shapes"),
        (lambda: comm.broadcast(x, int(odd)), "src=0.* src=1"),
        (lambda: comm.barrier() if odd else comm.all_gather(x),
         r"rank 0 all_gather\(8 x float32.*\).* rank 3 barrier\(\)"),
        (lambda: comm.reduce_scatter(x.int() if odd else x),
         r"8 x float32.*, sum\).* reduce_scatter\(8 x int32.*, sum\)"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"the ranks call different collectives: .*{message}"):
            call()
        assert comm.all_reduce(torch.ones(2)).tolist() == [4.0, 4.0]


def shared_store() -> dist.Store:
    """A store for messages between ranks that still works when the communicator has failed."""
    return dist.distributed_c10d._get_default_store()


def lose_a_rank(comm: Communicator, layout: str, victim: int) -> None:
    before = leakable_resources()
    x = torch.ones(100_000)
    comm.all_reduce(x)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        while True:
            assert comm.all_reduce(x.fill_(1)).eq(comm.world_size).all()
    assert time.monotonic() - started < TIMEOUT / 2  # Well before the timeout.
    message, culprit = str(caught.value), caught.value.rank
    del caught  # Its traceback holds tensors.
    with pytest.raises(PeerError, match="cannot be used after a failure.*make a new one"):
        comm.barrier()
    with pytest.raises(RuntimeError, match="closed"):
        comm.empty(3)
    # The mapping and the pidfds of this host's peers are already released.
    assert len(leakable_resources()) == len(before) - layout.count(layout[comm.rank])
    if culprit is None:
        assert "a rank of another host is gone" in message
        return
    assert layout[culprit] == layout[comm.rank]
    if culprit == victim:
        assert f"is rank {victim}" in message and "has died" in message
    else:  # Another rank of the same host noticed first.
        assert "gave up" in message


@pytest.mark.parametrize(("layout", "victim"), [("aabb", 3), ("aabb", 0), ("aaab", 3)])
def test_a_killed_rank_is_noticed_on_all_hosts(layout: str, victim: int) -> None:
    run_hosts(layout, lose_a_rank, layout, victim, killed=(victim,))


@on_hosts("aabb", timeout=2.0)
def test_a_late_rank_is_noticed_on_all_hosts(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 3:
        shared_store().wait([f"{rank} has given up" for rank in range(3)])
        with pytest.raises((PeerError, TimeoutError)):
            comm.barrier()
        return
    with pytest.raises((PeerError, TimeoutError) if comm.rank == 2 else TimeoutError) as caught:
        comm.all_reduce(torch.ones(5))
    shared_store().set(f"{comm.rank} has given up", "")
    with pytest.raises(RuntimeError, match="cannot be used after a failure"):
        comm.all_reduce(torch.ones(5))
    if comm.rank < 2:
        assert "a rank of another host did not arrive in time" in str(caught.value)
        assert "in all_reduce(5 x float32, sum, auto)" in str(caught.value)


@pytest.mark.parametrize("by_signal", [False, True])
@on_hosts("aabb")
def test_a_wait_for_another_host_can_be_interrupted(comm: Communicator, by_signal: bool) -> None:
    """Rank 0 gives up waiting for the other host; the error on rank 1, of its host, says so."""
    comm.barrier()
    if comm.rank >= 2:
        shared_store().wait(["0 has given up"])
        with pytest.raises(PeerError):
            comm.barrier()  # May succeed: the other host began it, and may have sent its messages.
            comm.barrier()
        return
    if comm.rank == 1:
        with pytest.raises(PeerError, match="rank 0 (gave up|has closed)"):
            comm.barrier()
        return

    def give_up() -> None:
        time.sleep(0.3)
        if by_signal:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            comm.close()

    started = time.monotonic()
    threading.Thread(target=give_up, daemon=True).start()
    with pytest.raises(KeyboardInterrupt if by_signal else RuntimeError):
        comm.barrier()
    assert time.monotonic() - started < TIMEOUT / 2  # Not the timeout.
    shared_store().set("0 has given up", "")
    with pytest.raises(RuntimeError, match="make a new one"):
        comm.barrier()


@on_hosts("ab")
def test_calls_from_several_threads_take_turns(comm: Communicator) -> None:
    """All threads make the same calls, as their order may differ by rank."""

    def work(_: int) -> None:
        for _ in range(10):
            assert comm.all_reduce(torch.ones(1000)).eq(comm.world_size).all()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
