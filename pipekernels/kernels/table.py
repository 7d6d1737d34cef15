"""What has been measured: by GPU, kind and shape class, the best configuration and how it compares.

Tables of measured GPUs are shipped in ``tables/``; ``pipekernels tune`` measures the GPU at hand
into the user's cache folder, whose entries come first. A lookup is one access to a dictionary.
Where nothing has been measured there is no entry, and the vendor's library is taken.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from pipekernels import _cache
from pipekernels.kernels.config import KINDS, Blocks, Config

FORMAT = 1  # To be raised when the kernel changes so that older measurements no longer hold.
FOLDER = Path(__file__).parent / "tables"
# C = A B^T for the three products of a linear layer: which operands are contiguous along k.
LAYOUTS = ["forward", "grad_input", "grad_weight"]
# By how much the kernel must have been faster to be taken: measurements scatter by about as much.
MARGIN = 1.02


class Shape(NamedTuple):
    """A product, or the class of those that one measurement stands for: the largest of them.

    Attributes:
        kind: see :data:`pipekernels.kernels.config.KINDS`.
        layout: one of :data:`LAYOUTS`.
        m, n, k: C is [m, n], of depth k.
    """

    kind: str
    layout: str
    m: int
    n: int
    k: int


class Entry(NamedTuple):
    """What was measured for a shape class.

    Attributes:
        shape: the product that was measured.
        config: the fastest configuration.
        seconds: its time.
        vendor_seconds: that of the vendor's library.
        speedup: the library's time by ours, the least over the class's shapes that were tried.
    """

    shape: Shape
    config: Config
    seconds: float
    vendor_seconds: float
    speedup: float

    @property
    def wins(self) -> bool:
        """Whether the kernel was so much faster that ``auto`` takes it."""
        return self.speedup >= MARGIN


class Table(NamedTuple):
    """What has been measured on one GPU model.

    Attributes:
        gpu: its name.
        date: when.
        versions: of what it was measured with.
        launch_seconds: how long the host takes to launch the kernel. While launches are not
            captured in a graph, a product that takes less time than that waits for the host.
        entries: by shape class.
    """

    gpu: str
    date: str
    versions: dict[str, str]
    launch_seconds: float
    entries: dict[Shape, Entry]

    def entry(self, kind: str, layout: str, m: int, n: int, k: int) -> Entry | None:
        """What was measured for the class of a product; sizes of at least 1."""
        return self.entries.get(shape_class(kind, layout, m, n, k))


def shape_class(kind: str, layout: str, m: int, n: int, k: int) -> Shape:
    """The class of a product; sizes of at least 1.

    Features come in steps of a quarter of a power of two, as models have few of them. The number of
    tokens (k of a weight's gradient, else m) is rounded up to a power of two.
    """
    if layout == "grad_weight":
        return Shape(kind, layout, _quarters(m), _quarters(n), _power(k))
    return Shape(kind, layout, _power(m), _quarters(n), _quarters(k))


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _quarters(size: int) -> int:
    step = max(_power(size) // 8, 1)
    return -(-size // step) * step


@functools.cache
def for_gpu(name: str) -> Table | None:
    """Everything measured on GPUs of this name, shipped or at hand; read once per process."""
    shipped = _cache.read(FOLDER / f"{_cache.slug(name)}.json", from_json)
    found = [table for table in (shipped, load(name)) if table]
    if not found:
        return None
    entries: dict[Shape, Entry] = {}
    for table in found:
        entries |= table.entries
    return found[-1]._replace(entries=entries)


def path(gpu: str) -> Path:
    """Where ``pipekernels tune`` keeps what it measures."""
    return _cache.file("sharded-gemm", gpu)


def load(gpu: str) -> Table | None:
    """What the user has measured; ``None``, with a warning, if the file cannot be used."""
    return _cache.read(path(gpu), from_json)


def save(table: Table) -> Path:
    """Add ``table`` to what the user has measured on this GPU, and return the file's path."""
    file, before = path(table.gpu), load(table.gpu)
    if before is not None:
        table = table._replace(entries=before.entries | table.entries)
    _cache.write(file, to_json(table))
    for_gpu.cache_clear()
    return file


def to_json(table: Table) -> dict[str, Any]:
    """``table`` as it is written to files, for :func:`from_json`."""
    entries = [
        {
            **entry.shape._asdict(),
            "config": entry.config,
            "seconds": entry.seconds,
            "vendor_seconds": entry.vendor_seconds,
            "speedup": entry.speedup,
        }
        for entry in table.entries.values()
    ]
    return {"format": FORMAT, **table._asdict(), "entries": entries}


def from_json(record: Any) -> Table:
    """The inverse of :func:`to_json`.

    Raises:
        ValueError: ``record`` is no such table.
    """
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}, which this version uses")
    try:
        entries = [_parse(**entry) for entry in record["entries"]]
        return Table(
            str(record["gpu"]),
            str(record["date"]),
            dict(record["versions"]),
            _positive(record["launch_seconds"]),
            {shape_class(*entry.shape): entry for entry in entries},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is incomplete: {error}") from None


def _parse(kind: str, layout: str, m: int, n: int, k: int, config: Any, **times: float) -> Entry:
    if kind not in KINDS or layout not in LAYOUTS:
        raise ValueError(f"there is no kind {kind!r} or layout {layout!r}")
    blocks, group_m, split_k = config
    sizes = [m, n, k, group_m, split_k, *blocks]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"sizes must be positive integers, got {sizes}")
    checked = {name: _positive(value) for name, value in times.items()}
    shape = Shape(kind, layout, m, n, k)
    return Entry(shape, Config(Blocks(*blocks), group_m, split_k), **checked)


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"times must be positive numbers, got {value!r}")
    number: float = value
    return number
