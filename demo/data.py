"""Training data: the sources of the standard library of the interpreter that runs."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library(max_bytes: int = 4_000_000) -> Tensor:
    """The top-level modules of the standard library, joined in order of name: uint8 ``[bytes]``."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text[:max_bytes]), dtype=torch.uint8)


def batches(
    corpus: Tensor, steps: int, batch: int, context: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """``steps`` pairs of (bytes, next bytes), each int64 ``[batch, context]``, at random places."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(corpus.numel() - context, (batch, 1), generator=generator)
        windows = corpus[starts + torch.arange(context + 1)].long()
        yield windows[:, :-1], windows[:, 1:]
