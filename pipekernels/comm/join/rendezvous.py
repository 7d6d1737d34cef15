"""How ranks communicate before they share memory: by a process group, store, or communicator."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from pipekernels._arguments import check_integer, check_kind
from pipekernels._torch_private import default_group, store_of
from pipekernels.comm import messages
from pipekernels.comm.errors import PeerError
from pipekernels.comm.join.deadline import Deadline
from pipekernels.comm.join.process import has_died, own_process

T = TypeVar("T")

MOST_RANKS = 1 << 16  # Every rank lists the entries of all others as they join.
_LATEST = "pipekernels/session"  # The key of the latest session's name.
_LONGEST_PAUSE = 0.1  # Seconds between polls of that key.


class AllGather(Protocol):
    """A collective that returns the items of all ranks, in rank order; ``message_type`` as for
    :func:`pipekernels.comm.messages.decode`."""

    def __call__(self, item: Any, message_type: type[T]) -> list[T]: ...


class Rendezvous(NamedTuple):
    """A set of ranks, of which this process is one.

    Attributes:
        rank: of this process.
        world_size: the number of ranks.
        all_gather: exchanges messages between the ranks.
        store: reachable by all ranks; used to connect hosts.
        group: a :mod:`torch.distributed` group of the same ranks, if there is one.
        deadline: by which the ranks must have joined; ``None`` to start the timeout after the first
            exchange.
    """

    rank: int
    world_size: int
    all_gather: AllGather
    store: dist.Store | None
    group: dist.ProcessGroup | None
    deadline: Deadline | None = None


def over_group(group: dist.ProcessGroup | None) -> Rendezvous:
    """The ranks of a ``torch.distributed`` group that this process is in."""
    group = default_group() if group is None else group
    all_gather = partial(messages.all_gather_in_group, group=group)
    store = store_of(group)
    size = dist.get_world_size(group)
    return Rendezvous(dist.get_rank(group), size, all_gather, store, group)


def over_store(store: dist.Store, rank: int, world_size: int, deadline: Deadline) -> Rendezvous:
    """The processes that share ``store``, which :func:`meet` has returned."""
    rounds = 0

    def all_gather(item: Any, message_type: type[T]) -> list[T]:
        nonlocal rounds
        rounds += 1
        keys = [f"{rounds}/{peer}" for peer in range(world_size)]
        store.set(keys[rank], messages.encode(item).decode())
        _await_ranks(store, keys, store, deadline)
        return [
            messages.decode(store.get(key), f"rank {peer}", message_type)
            for peer, key in enumerate(keys)
        ]

    return Rendezvous(rank, world_size, all_gather, store, None, deadline)


def meet(store: dist.Store, rank: int, world_size: int, deadline: Deadline) -> dist.Store:
    """Wait for all processes; returns a part of ``store`` for their use only.

    The store may hold entries of earlier processes: under torchrun it is the agent's, which
    outlives the workers that it restarts (https://github.com/pytorch/pytorch/issues/135712), and
    the agents of several hosts may count restarts differently. So rank 0 opens a session with a new
    name, the others enter it with random tokens, and rank 0 lists the tokens. A rank that finds its
    own token in a session's list knows that the session is current.

    Raises:
        TimeoutError: a rank did not enter in time.
        PeerError: a rank of this host has died after it had entered.
        TypeError, ValueError: ``rank`` or ``world_size`` is not an integer in its range.
    """
    check_kind("store", store, dist.Store, "a torch.distributed.Store")
    check_integer("rank", rank)
    check_integer("world_size", world_size)
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size must be in 1..{MOST_RANKS}, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..world_size - 1, got {rank} of {world_size}")
    token = f"pipekernels-{secrets.token_hex(16)}"
    if rank == 0:
        session = _open(store, token, world_size, deadline)
    else:
        session = _enter(store, token, rank, world_size, deadline)
    return dist.PrefixStore(session, store)


def late(store: dist.Store, keys: Sequence[str], deadline: Deadline) -> list[int]:
    """Wait for ``keys``; returns the indices of those that were not set in time."""
    if not keys:
        return []
    try:
        store.wait(list(keys), deadline.for_store())
    except RuntimeError:
        return [index for index, key in enumerate(keys) if not store.check([key])]
    return []


def of_color(choices: Sequence[tuple[int | None, int]], color: int | None) -> list[int]:
    """The ranks with this ``color``, by key, then rank; ``choices``: color and key by rank."""
    ranks = [rank for rank, choice in enumerate(choices) if choice[0] == color]
    return sorted(ranks, key=lambda rank: (choices[rank][1], rank))


def _open(store: dist.Store, token: str, world_size: int, deadline: Deadline) -> str:
    """As rank 0, open a session and list its tokens; returns the session's name."""
    session = token
    keys = _entries(session, world_size)
    members = dist.PrefixStore(session, store)
    _introduce(members, 0)
    store.set(keys[0], token)
    store.set(_LATEST, session)
    _await_ranks(store, keys, members, deadline)
    tokens = [store.get(key).decode(errors="replace") for key in keys]
    store.set(f"{session}/all", messages.encode(tokens).decode())
    return session


def _enter(store: dist.Store, token: str, rank: int, world_size: int, deadline: Deadline) -> str:
    """Enter the latest session until that is a current one; returns its name."""
    _check_none(late(store, [_LATEST], deadline), world_size, deadline)
    entered, pause = "", 0.002
    while True:
        session = store.get(_LATEST).decode(errors="replace")
        keys = _entries(session, world_size)
        members = dist.PrefixStore(session, store)
        if session != entered:
            _introduce(members, rank)
            store.set(keys[rank], token)
            entered = session
        if store.check([f"{session}/all"]):
            tokens = messages.decode(store.get(f"{session}/all"), "rank 0", list[str])
            if tokens[rank : rank + 1] == [token]:
                return session
        if deadline.left() == 0:
            absent = [peer for peer, key in enumerate(keys) if not store.check([key])]
            # If no entry is missing, the session is an old one, so rank 0 is missing.
            _check_none(absent or [0], world_size, deadline)
        if pause == _LONGEST_PAUSE and not store.check([f"{session}/all"]):
            _check_alive(members, range(world_size))
        time.sleep(pause)  # Not store.wait(): TCPStore logs every timeout.
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def _entries(session: str, world_size: int) -> list[str]:
    """Keys under which the ranks enter a session."""
    return [f"{session}/{rank}" for rank in range(world_size)]


def _introduce(store: dist.Store, rank: int) -> None:
    """Let the other ranks see whether this process still runs."""
    store.set(f"process/{rank}", messages.encode(own_process()).decode())


def _await_ranks(
    store: dist.Store, keys: Sequence[str], members: dist.Store, deadline: Deadline
) -> None:
    """Wait for ``keys``, one of each rank.

    Raises:
        TimeoutError: a rank did not set its key in time.
        PeerError: one of this host, which has introduced itself in ``members``, has died.
    """
    pause = 0.001
    while not store.check(list(keys)):  # Not store.wait(): TCPStore logs every timeout.
        is_late = deadline.left() == 0
        if is_late or pause == _LONGEST_PAUSE:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            _check_none(absent if is_late else (), len(keys), deadline)
            _check_alive(members, absent)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def _check_alive(members: dist.Store, ranks: Iterable[int]) -> None:
    """Raise PeerError if one of ``ranks`` is known to have died."""
    for rank in ranks:
        key = f"process/{rank}"
        if members.check([key]) and has_died(members.get(key)):
            raise PeerError(f"rank {rank} has died before the communicator was made", rank)


def _check_none(ranks: Sequence[int], world_size: int, deadline: Deadline) -> None:
    """Raise TimeoutError if any of ``ranks`` are late."""
    if ranks:
        raise TimeoutError(
            f"rank(s) {', '.join(map(str, ranks))} of {world_size} did not join within "
            f"{deadline.seconds:g} s"
        )
