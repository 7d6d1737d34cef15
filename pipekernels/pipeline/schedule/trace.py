"""Files of the Trace Event Format, which Perfetto and chrome://tracing read: a process per rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn


class Span(NamedTuple):
    """A box in the row of a lane; times in seconds of ``time.perf_counter``."""

    lane: int
    name: str
    category: str
    start: float
    end: float
    args: dict[str, int]


class RankTrace(NamedTuple):
    """What a rank shows.

    Attributes:
        lanes: their names.
        spans: boxes in them.
        shares: by name, from 0 to 1; shown beside the name of the rank.
    """

    lanes: Sequence[str]
    spans: Sequence[Span]
    shares: dict[str, float]


def save(path: str | os.PathLike[str], mine: RankTrace, group: dist.ProcessGroup | None) -> None:
    """Write ``mine``, or on rank 0 of ``group`` the traces of all its ranks."""
    to_wall_clock = time.time() - time.perf_counter()  # Other hosts count from other moments.
    start = min((span.start for span in mine.spans), default=float("inf")) + to_wall_clock
    rank = 0
    if group is not None:
        rank = group.rank()
        first = torch.tensor(start, dtype=torch.float64)
        dist.all_reduce(first, dist.ReduceOp.MIN, group)
        start = first.item()
    text = json.dumps([mine.shares, _rows(rank, mine, to_wall_clock - start)])
    texts = [text] if group is None else _gathered(text, group)
    if rank != 0:
        return
    found = [json.loads(each) for each in texts]
    file = {
        "traceEvents": [row for _, rows in found for row in rows],
        "displayTimeUnit": "ms",
        "otherData": {f"rank {i}": shares for i, (shares, _) in enumerate(found)},
    }
    Path(path).write_text(json.dumps(file))


def _gathered(text: str, group: dist.ProcessGroup) -> list[str]:
    """The texts of all ranks; as tensors, since what arrives must not be unpickled."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group)
    most = max(int(size) for size in sizes)
    texts = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, nn.functional.pad(data, (0, most - data.numel())), group)
    return [bytes(t[: int(n)].tolist()).decode() for t, n in zip(texts, sizes, strict=True)]


def _rows(rank: int, trace: RankTrace, offset: float) -> list[dict[str, Any]]:
    """The events of a rank, ``offset`` seconds later, with the names of rank and lanes."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in trace.shares.items())
    meta: dict[str, Any] = {"ph": "M", "pid": rank}
    rows = [
        {**meta, "name": "process_name", "args": {"name": f"rank {rank}: {shares}"}},
        {**meta, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for lane, name in enumerate(trace.lanes):
        rows.append({**meta, "tid": lane, "name": "thread_name", "args": {"name": name}})
    for lane, name, category, start, end, args in trace.spans:
        rows.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": lane,
                "name": name,
                "cat": category,
                "ts": (start + offset) * 1e6,
                "dur": (end - start) * 1e6,
                "args": args,
            }
        )
    return rows
