"""How fast the GPUs of a host reach each other, measured: :class:`LinkModel`.

``pipekernels tune`` saves it in a file in the user's cache folder, by GPU and number of ranks.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

from pipekernels import _cache

FORMAT = 1  # Increase it when a change of the kernels invalidates older measurements.


class LinkModel(NamedTuple):
    """Transfers between GPUs with peer access: b bytes take alpha + beta b.

    Attributes:
        alpha: seconds until every rank has seen a signal of every other.
        beta: seconds per byte that a GPU reads from its peers.
        block_beta: seconds per byte that one thread block can read from them.
    """

    alpha: float
    beta: float
    block_beta: float

    def check(self) -> LinkModel:
        """``self``; ValueError unless the figures can be times: noise may make them negative."""
        if not (all(0 < seconds < math.inf for seconds in self) and self.beta <= self.block_beta):
            raise ValueError(f"the times are too noisy, or something else uses the GPUs: {self}")
        return self


@functools.cache
def for_gpu(gpu: str, ranks: int) -> LinkModel | None:
    """What was measured with so many ranks on GPUs of this name; read once per process."""
    return load(gpu).get(ranks)


def path(gpu: str) -> Path:
    """Where ``pipekernels tune`` saves its measurements."""
    return _cache.file("links", gpu)


def load(gpu: str) -> dict[int, LinkModel]:
    """The measurements by number of ranks; with a warning, none if the file is not valid."""
    return _cache.read(path(gpu), FORMAT, _parse) or {}


def save(gpu: str, links: dict[int, LinkModel]) -> Path:
    """Add ``links`` to the measurements on this GPU, and return the file's path."""
    known = sorted((load(gpu) | links).items())
    records = [{"ranks": ranks, **link._asdict()} for ranks, link in known]
    for_gpu.cache_clear()
    return _cache.write(path(gpu), FORMAT, {"gpu": gpu, "date": _cache.now(), "links": records})


def _parse(record: dict[str, Any]) -> dict[int, LinkModel]:
    links = {}
    for each in record["links"]:
        ranks = each["ranks"]
        if type(ranks) is not int or ranks < 2:
            raise ValueError(f"a link has at least 2 ranks, got {ranks!r}")
        links[ranks] = LinkModel(*(float(each[name]) for name in LinkModel._fields)).check()
    return links
