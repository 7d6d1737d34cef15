"""How ranks join: validation of messages, whose memory is opened, and timeouts."""

import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import TIMEOUT
from support.levels import in_gate
from support.ranks import on_ranks

from pipekernels import Communicator, PeerError, _backend
from pipekernels.comm import messages
from pipekernels.comm.bootstrap import processes as bootstrap
from pipekernels.comm.bootstrap import rendezvous


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[" * 200_000,
        b"{}",
        messages.encode([["host"], 1, "name", 0]),
        messages.encode([["host"], "1", "name", 0, 0]),
        messages.encode([["host", 1], 1, "name", 0, 0]),
        messages.encode([["host"], 1, "name", 0.5, 0]),
        b"[[], 1" + b"0" * 5000 + b", 0, 0]",
    ],
)
def test_a_malformed_message_is_an_error(payload: Any) -> None:
    store = dist.HashStore()
    store.set("pipekernels/2/1/1/1", payload)  # As rank 1, in the first of its exchanges.
    with pytest.raises(RuntimeError, match="rank 1 sent .* cannot be read .*same version"):
        Communicator.from_store(store, 0, 2, timeout=TIMEOUT)


@pytest.mark.parametrize("world_size", [0, 2**16 + 1, 2**31])
def test_a_number_of_ranks_that_cannot_be_is_refused_at_once(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size must be in 1..65536, got {world_size}"):
        Communicator.from_store(dist.HashStore(), 0, world_size, timeout=TIMEOUT)


@pytest.mark.parametrize("form", [bytes, bytes.hex])
def test_nothing_in_a_store_is_unpickled(form: Callable[[bytes], Any], tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set("pipekernels/2/1/1/1", form(pickle.dumps(Bomb(tmp_path / "exploded"))))
    ranks = rendezvous.over_store(store, 0, 2, TIMEOUT)
    with pytest.raises(RuntimeError, match="rank 1 sent .* cannot be read"):
        ranks.all_gather("", str)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("size", [-1, 0, messages.MOST + 1, 1 << 62])
def test_an_impossible_message_size_is_an_error(size: int) -> None:
    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, torch.full_like(tensor, size)])

    with pytest.raises(RuntimeError, match=f"rank 1 announced a message of {size} bytes"):
        messages.all_gather("", str, gather, torch.device("cpu"))


@on_ranks(3)
def test_a_store_serves_several_communicators(alone: Communicator, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)
    with Communicator.from_store(store, 0, 1):  # One rank of one: joins no others.
        pass
    for _ in range(3):
        with Communicator.from_store(store, alone.rank, 3, timeout=TIMEOUT) as comm:
            assert comm.all_reduce(torch.tensor([10.0**comm.rank])).item() == 111


@pytest.mark.parametrize("why", ["another user", "no such descriptor"])
def test_only_memory_of_this_user_is_opened(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process, fd = bootstrap._Process((), os.getpid(), ""), _backend.load().Segment.create(2)
    error, says = OSError, "No such file"
    try:
        os.close(bootstrap._open(process, fd))
        if why == "another user":
            monkeypatch.setattr(os, "geteuid", lambda: -1)
            error, says = PermissionError, "belongs to another user"
        with pytest.raises(error, match=says):
            bootstrap._open(process, fd if why == "another user" else 1 << 20)
    finally:
        os.close(fd)


@pytest.mark.parametrize("hosts", in_gate(["aaa", "aab"], ["aaa", "aab", "abb"]))
@on_ranks(3, killed=(2,))
def test_a_rank_that_dies_while_it_joins_is_named_within_the_timeout(
    alone: Communicator, hosts: str, tmp_path: Path
) -> None:
    os.environ["PIPEKERNELS_HOST_ID"] = hosts[alone.rank]
    if alone.rank == 2:  # Dies after the others have its message.
        vars(bootstrap)["_count_hosts"] = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    store = dist.FileStore(str(tmp_path / "store"), 3)
    alone.barrier()
    began = time.monotonic()
    with pytest.raises((PeerError, TimeoutError)) as caught:
        Communicator.from_store(store, alone.rank, 3, timeout=6.0)
    seconds = time.monotonic() - began
    if hosts[alone.rank] == hosts[2]:  # Seen at once by the ranks of its host.
        assert str(caught.value) == "rank 2 has died before the communicator was made"
    else:
        assert "rank(s) 2 did not join within " in str(caught.value)
        assert seconds < 11  # A timeout per wait instead of one in all would take 12 or 18 s.


def test_threads_make_communicators_at_the_same_time() -> None:
    """The process would abort if pybind11 registered their objects without the interpreter's
    lock."""

    def make(number: int) -> list[int]:
        ranks = []
        for _ in range(200):
            first, _second = Communicator.threads(2)
            ranks.append(first.empty(5).numel())
        return ranks

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(make, range(6))) == [[5] * 200] * 6
