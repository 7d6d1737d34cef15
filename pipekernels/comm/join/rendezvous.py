"""How ranks talk before they share memory: over a process group, a store, or a communicator."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist


class Rendezvous(NamedTuple):
    """A set of ranks, of which this process is one.

    Attributes:
        rank: of this process.
        world_size: the number of ranks.
        all_gather: a collective that gives every rank what all of them passed, in rank order.
        store: one that all ranks reach; connections between hosts are made through it.
        cuda_backend: what carries CUDA tensors between hosts, as :mod:`torch.distributed` calls it;
            empty if nothing does.
    """

    rank: int
    world_size: int
    all_gather: Callable[[Any], list[Any]]
    store: dist.Store | None
    cuda_backend: str


def over_group(group: dist.ProcessGroup | None) -> Rendezvous:
    """The ranks of a ``torch.distributed`` group that this process is in."""
    group = dist.distributed_c10d._get_default_group() if group is None else group
    world_size = dist.get_world_size(group)

    def all_gather(item: Any) -> list[Any]:
        items = [None] * world_size
        dist.all_gather_object(items, item, group)
        return items

    store = dist.distributed_c10d._get_process_group_store(group)
    backends = dict(item.split(":", 1) for item in dist.get_backend_config(group).split(","))
    cuda_backend = backends.get("cuda", "")
    return Rendezvous(dist.get_rank(group), world_size, all_gather, store, cuda_backend)


def over_store(store: dist.Store, rank: int, world_size: int, timeout: float) -> Rendezvous:
    """``world_size`` processes that reach one store, under keys that nothing else uses."""
    rounds = 0

    def all_gather(item: Any) -> list[Any]:
        nonlocal rounds
        rounds += 1
        keys = [f"pipekernels/{rounds}/{peer}" for peer in range(world_size)]
        # Earlier keys of the others would be read, and be out of date.
        if rounds == 1 and store.check([keys[rank]]):
            raise ValueError(
                f"rank {rank} has made a communicator with this store before; pass a new store, or a "
                "new PrefixStore over this one"
            )
        store.set(keys[rank], pickle.dumps(item).hex())
        try:
            # The others may have needed as long for what came before.
            store.wait(keys, datetime.timedelta(seconds=rounds * timeout))
        except RuntimeError:
            late = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
            if not late:
                raise
            raise TimeoutError(
                f"rank(s) {', '.join(late)} of {world_size} did not come to make a communicator "
                f"within {timeout:g} s"
            ) from None
        return [pickle.loads(bytes.fromhex(store.get(key).decode())) for key in keys]

    return Rendezvous(rank, world_size, all_gather, store, "nccl")


def of_color(choices: Sequence[tuple[int | None, int]], color: int | None) -> list[int]:
    """The ranks that choose ``color``, by key, then rank; ``choices``: colour and key of each."""
    ranks = [rank for rank, choice in enumerate(choices) if choice[0] == color]
    return sorted(ranks, key=lambda rank: (choices[rank][1], rank))
