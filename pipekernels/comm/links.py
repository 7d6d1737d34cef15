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


@functools.cache
def for_gpu(gpu: str, ranks: int) -> LinkModel | None:
    """What was measured with so many ranks on GPUs of this name; read once per process."""
    return load(gpu).get(ranks)


def path(gpu: str) -> Path:
    """Where ``pipekernels tune`` saves its measurements."""
    return _cache.file("links", gpu)


def load(gpu: str) -> dict[int, LinkModel]:
    """The measurements by number of ranks; with a warning, none if the file is not valid."""
    return _cache.read(path(gpu), _parse) or {}


def save(gpu: str, links: dict[int, LinkModel]) -> Path:
    """Add ``links`` to the measurements on this GPU, and return the file's path."""
    file = path(gpu)
    records = [
        {"ranks": ranks, **link._asdict()} for ranks, link in sorted((load(gpu) | links).items())
    ]
    _cache.write(file, {"format": FORMAT, "gpu": gpu, "date": _cache.now(), "links": records})
    for_gpu.cache_clear()
    return file


def is_valid(link: LinkModel) -> bool:
    """Whether the figures can be times: noise may make them negative."""
    return all(0 < seconds < math.inf for seconds in link) and link.beta <= link.block_beta


def _parse(record: Any) -> dict[int, LinkModel]:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}, which this version uses")
    links = {}
    try:
        for each in record["links"]:
            ranks, link = each["ranks"], LinkModel(*(float(each[f]) for f in LinkModel._fields))
            if type(ranks) is not int or ranks < 2 or not is_valid(link):
                raise ValueError(f"it has no link of {ranks!r} ranks: {link}")
            links[ranks] = link
    except (KeyError, TypeError) as error:
        raise ValueError("it is incomplete") from error
    return links
