"""Random messages and all_to_all of torch.distributed, whose results are known."""

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.sweeps.collectives import FLOATS, INTEGERS, KINDS, OTHERS, bits, place, same_bits

ANY_TAG = 99  # Of messages that are received from any rank.


@dataclass
class Planned:
    """A message."""

    source: int
    target: int
    tag: int
    values: Tensor
    tensor: Any = None
    work: Any = None


def values(generator: random.Random, dtype: torch.dtype, columns: int = 0) -> Tensor:
    count = int(300_000 ** generator.uniform(0, 1)) - generator.choice([0, 0, 1])
    if columns:
        count = count // columns // 8
    random_bits = torch.Generator().manual_seed(generator.randrange(2**40))
    shape = (count, columns) if columns else (count,)
    return torch.randint(0, 100, shape, generator=random_bits).to(dtype)


def exchange(seed: int) -> None:
    """Several messages of all pairs; each rank makes its calls, and waits, in its own order."""
    group: Any = dist.group.WORLD
    rank, size, comm = dist.get_rank(), dist.get_world_size(), group._comm
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    dtype = shared.choice(FLOATS + INTEGERS + OTHERS)
    plan = [
        Planned(source, target, tag, values(shared, dtype))
        for source in range(size)
        for target in range(size)
        for tag in sorted(shared.choices(range(3), k=shared.randrange(4)))
        if source != target
    ]
    place_of = {(each.source, each.target, each.tag): own.random() for each in plan}
    batch = own.random() < 0.3
    operations = []
    for each in sorted(plan, key=lambda each: place_of[each.source, each.target, each.tag]):
        if rank not in (each.source, each.target):
            continue
        is_sent = rank == each.source
        tensor = each.values if is_sent else torch.zeros_like(each.values)
        each.tensor = place(comm, tensor, own.choice(KINDS), own.randrange(8))
        call, peer = (dist.isend, each.target) if is_sent else (dist.irecv, each.source)
        if batch:
            operations.append((each, dist.P2POp(call, each.tensor, peer, tag=each.tag)))
        else:
            each.work = call(each.tensor, peer, tag=each.tag)
    if operations:
        works = dist.batch_isend_irecv([operation for _, operation in operations])
        for (each, _), work in zip(operations, works, strict=True):
            each.work = work
    for each in own.sample(plan, len(plan)):
        if each.work is not None:
            each.work.wait()
            assert same_bits(each.tensor, each.values), (rank, seed, each)
    root = shared.randrange(size)
    if rank != root:
        dist.send(torch.full((5,), rank), root, tag=ANY_TAG)
    else:
        received = torch.zeros(5, dtype=torch.int64)
        sources = {dist.recv(received, tag=ANY_TAG): received[4].item() for _ in range(size - 1)}
        assert sources == {peer: peer for peer in range(size) if peer != root}


def swap(seed: int) -> None:
    """all_to_all of tensors of uneven sizes."""
    group: Any = dist.group.WORLD
    rank, size, comm = dist.get_rank(), dist.get_world_size(), group._comm
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    dtype, columns = shared.choice(FLOATS + INTEGERS + OTHERS), shared.choice([1, 3])
    parts = [[values(shared, dtype, columns) for _ in range(size)] for _ in range(size)]
    sent, expected = parts[rank], [row[rank] for row in parts]

    def placed(tensor: Tensor) -> Tensor:
        return place(comm, tensor, own.choice(KINDS), own.randrange(8))

    if shared.random() < 0.5:
        results = [placed(torch.zeros_like(each)) for each in expected]
        work = dist.all_to_all(results, list(map(placed, sent)), async_op=seed % 2 == 0)
        result = results
    else:
        whole = placed(torch.zeros_like(torch.cat(expected)))
        sizes = [[len(each) for each in tensors] for tensors in (expected, sent)]
        option: Any = {"async_op": seed % 2 == 0}
        work = dist.all_to_all_single(whole, placed(torch.cat(sent)), sizes[0], sizes[1], **option)
        result = [whole]
    if work is not None:
        work.wait()
    assert torch.cat(list(map(bits, result))).equal(torch.cat(list(map(bits, expected)))), seed


def messages_in_group(rank: int, seeds: range) -> None:
    for seed in seeds:
        (swap if seed % 3 == 0 else exchange)(seed)
