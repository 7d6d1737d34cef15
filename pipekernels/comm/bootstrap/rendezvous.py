"""How ranks communicate before they share memory: by a process group, store, or communicator;
how long they wait for each other; and how they know each other's processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from pipekernels._arguments import check_integer, check_kind
from pipekernels._torch_private import default_group, store_of
from pipekernels.comm import messages
from pipekernels.comm.errors import PeerError

T = TypeVar("T")

MOST_RANKS = 1 << 16  # Every rank lists the entries of all others as they join.
_LONGEST_PAUSE = 0.1  # Seconds between polls of a store.
_MOST_SECONDS = 1e9  # Seconds, 31 years; 64-bit clocks of nanoseconds overflow after 292 years.


def check_timeout(timeout: float) -> None:
    """Raise TypeError or ValueError unless ``timeout`` is a time for a rank to wait."""
    if not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds, got {type(timeout).__name__}")
    if not 0 < timeout <= _MOST_SECONDS:
        raise ValueError(
            f"timeout must be a positive number of seconds, at most {_MOST_SECONDS:.0e}, "
            f"got {timeout}"
        )


def host_identity() -> tuple[str, ...]:
    """Equal for two processes of one user, host name and network that can see each other's pids and
    have the same environment variable ``PIPEKERNELS_HOST_ID``."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    override = os.environ.get("PIPEKERNELS_HOST_ID", "")
    return (socket.gethostname(), boot_id, *namespaces, str(os.geteuid()), override)


class Process(NamedTuple):
    """What tells a process from all others."""

    host: tuple[str, ...]
    pid: int
    start: int | None  # A pid alone may be given to a later process.


def start_time(pid: int) -> int | None:
    """In clock ticks since the host was booted; None if the process does not exist or has
    ended and waits for its parent."""
    try:
        # The name in parentheses may have spaces; the fields after it are the 3rd and further ones.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Rendezvous(NamedTuple):
    """A set of ranks, of which this process is ``rank``."""

    rank: int
    world_size: int
    # all_gather(item, its type, see messages.decode()) -> one item per rank, in rank order.
    all_gather: Callable[[Any, Any], list[Any]]
    store: dist.Store | None  # Reachable by all ranks; used to connect hosts.
    group: dist.ProcessGroup | None = None  # Of the same ranks, if there is one.


def over_group(group: dist.ProcessGroup | None) -> Rendezvous:
    """The ranks of a ``torch.distributed`` group that this process is in."""
    group = default_group() if group is None else group
    all_gather = partial(messages.all_gather_in_group, group=group)
    store = store_of(group)
    size = dist.get_world_size(group)
    return Rendezvous(dist.get_rank(group), size, all_gather, store, group)


def over_store(store: dist.Store, rank: int, world_size: int, timeout: float) -> Rendezvous:
    """The processes that share ``store``, by a part of it for their use only. All exchanges must
    have ended ``timeout`` seconds from now.

    Each rank counts the times that it joins as many ranks over ``store``; ranks with equal counts
    meet. As with torch's own groups, the store must not have counts of processes that were
    restarted since: torchrun's outlives its workers, so torch gives each attempt a prefix
    (https://github.com/pytorch/pytorch/issues/135712).

    Raises:
        TypeError, ValueError: ``rank`` or ``world_size`` is not an integer in its range.
    """
    check_kind("store", store, dist.Store, "a torch.distributed.Store")
    check_integer("rank", rank)
    check_integer("world_size", world_size)
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size must be in 1..{MOST_RANKS}, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..world_size - 1, got {rank} of {world_size}")
    prefix = f"pipekernels/{world_size}"
    ours = dist.PrefixStore(f"{prefix}/{store.add(f'{prefix}/{rank}', 1)}", store)
    # Peers that wait for this rank look whether its process still runs.
    process = Process(host_identity(), os.getpid(), start_time(os.getpid()))
    ours.set(f"process/{rank}", messages.encode(process).decode())
    end = time.monotonic() + timeout
    rounds = 0  # Each exchange has keys of its own: a late rank still reads the last exchange's.

    def all_gather(item: Any, message_type: type[T]) -> list[T]:
        nonlocal rounds
        rounds += 1
        keys = {f"{rounds}/{peer}": peer for peer in range(world_size)}
        ours.set(f"{rounds}/{rank}", messages.encode(item).decode())
        _await_ranks(ours, keys, end, f"within {timeout:g} s")
        return [
            messages.decode(ours.get(key), f"rank {peer}", message_type)
            for key, peer in keys.items()
        ]

    return Rendezvous(rank, world_size, all_gather, ours)


def _await_ranks(store: dist.Store, ranks: dict[str, int], end: float, limit: str) -> None:
    """Wait until each of ``ranks`` has set its key. TimeoutError, after the time ``end``, names the
    ranks that are late, and the ``limit``; PeerError names a rank that has died."""
    pause = 0.001
    while not store.check(list(ranks)):  # Not store.wait(): TCPStore logs every timeout.
        # Each check of one rank is a round trip to the store, so only once waits are long.
        is_late = time.monotonic() >= end
        if is_late or pause == _LONGEST_PAUSE:
            absent = [rank for key, rank in ranks.items() if not store.check([key])]
            if absent and is_late:
                raise TimeoutError(f"rank(s) {', '.join(map(str, absent))} did not join {limit}")
            _check_alive(store, absent)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def _check_alive(store: dist.Store, ranks: Iterable[int]) -> None:
    """Raise PeerError if one of ``ranks``, which has introduced itself in ``store``, has died."""
    for rank in ranks:
        key = f"process/{rank}"
        if not store.check([key]):
            continue
        host, pid, start = messages.decode(store.get(key), "a rank", Process)
        # Processes of other hosts cannot be seen.
        if host == host_identity() and start_time(pid) != start:
            raise PeerError(f"rank {rank} has died before the communicator was made", rank)


def of_color(choices: Sequence[tuple[int | None, int]], color: int | None) -> list[int]:
    """The ranks with this ``color``, by key, then rank; ``choices``: color and key by rank."""
    ranks = [rank for rank, choice in enumerate(choices) if choice[0] == color]
    return sorted(ranks, key=lambda rank: (choices[rank][1], rank))
