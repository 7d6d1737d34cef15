"""Measurements: the best configuration by GPU, kind and shape class, compared with the library.

Tables of measured GPUs are shipped in ``tables/``; ``pipekernels tune`` measures the local GPU into
the user's cache folder, whose entries take precedence. Products without an entry are left to the
vendor's library.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from pipekernels import _cache
from pipekernels.kernels.config import KINDS, Blocks, Config

FORMAT = 2  # Increase it when a change of the kernel invalidates older measurements.
FOLDER = Path(__file__).parent / "tables"
LAYOUTS = ["forward", "grad_input", "grad_weight"]  # See layout_of().
MARGIN = 1.02  # Least measured speedup for 'auto' to use the kernel; about the measurements' noise.


class Shape(NamedTuple):
    """A product, or a class of similar products, named by the largest of them.

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


class Measurement(NamedTuple):
    """The measurement of a shape class.

    Attributes:
        shape: the product that was measured.
        config: the fastest configuration.
        seconds: its time.
        vendor_seconds: the time of the vendor's library.
        speedup: the library's time divided by ours, the least over the measured shapes of the
            class.
    """

    shape: Shape
    config: Config
    seconds: float
    vendor_seconds: float
    speedup: float

    @property
    def wins(self) -> bool:
        """Whether the kernel was faster by enough for ``auto`` to use it."""
        return self.speedup >= MARGIN


class Table(NamedTuple):
    """All measurements on one GPU model.

    Attributes:
        gpu: its name.
        date: of the measurement.
        versions: of torch, CUDA and Triton.
        launch_seconds: the host's time to launch the kernel. Outside CUDA graphs a shorter product
            is bound by the host.
        entries: by shape class.
    """

    gpu: str
    date: str
    versions: dict[str, str]
    launch_seconds: float
    entries: dict[Shape, Measurement]

    def may_gain(self, kind: str, m: int, n: int, k: int) -> bool:
        """Whether a product of these sizes, in any layout, may gain by the kernel."""
        for layout in LAYOUTS:
            entry = self.entries.get(shape_class(kind, layout, m, n, k))
            if entry is not None and entry.wins:
                return True
        return False

    def entry(self, kind: str, layout: str, m: int, n: int, k: int) -> Measurement | None:
        """The measurement for a product's class; sizes must be at least 1."""
        return self.entries.get(shape_class(kind, layout, m, n, k))


@functools.lru_cache(maxsize=4096)  # Products of one row take no longer than a few such calls.
def shape_class(kind: str, layout: str, m: int, n: int, k: int) -> Shape:
    """The class of a product; sizes must be at least 1.

    Features are rounded up to a quarter step between powers of two, as models have few distinct
    sizes. The number of tokens (k of a weight's gradient, else m) is rounded up to a power of two.
    """
    if layout == "grad_weight":
        return Shape(kind, layout, _round_to_quarter(m), _round_to_quarter(n), _round_to_power(k))
    return Shape(kind, layout, _round_to_power(m), _round_to_quarter(n), _round_to_quarter(k))


def _round_to_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _round_to_quarter(size: int) -> int:
    step = max(_round_to_power(size) // 8, 1)
    return -(-size // step) * step


@functools.cache
def for_gpu(name: str) -> Table | None:
    """All shipped and the user's measurements on GPUs of this name; read once per process."""
    shipped = _cache.read(FOLDER / f"{_cache.slug(name)}.json", FORMAT, from_json)
    own = load(name)
    if shipped is None or own is None:
        return own or shipped
    return own._replace(entries=shipped.entries | own.entries)


def path(gpu: str) -> Path:
    """Where ``pipekernels tune`` saves its measurements."""
    return _cache.file("sharded-gemm", gpu)


def load(gpu: str) -> Table | None:
    """The user's measurements; ``None`` without any, or with a warning if the file is not valid."""
    return _cache.read(path(gpu), FORMAT, from_json)


def save(table: Table) -> Path:
    """Add ``table`` to the user's measurements on this GPU, and return the file's path."""
    before = load(table.gpu)
    if before is not None:
        table = table._replace(entries=before.entries | table.entries)
    for_gpu.cache_clear()
    return _cache.write(path(table.gpu), FORMAT, to_json(table))


def to_json(table: Table) -> dict[str, Any]:
    """``table`` as JSON, for :func:`from_json`."""
    entries = []
    for entry in table.entries.values():
        record = entry._asdict()
        config = {**entry.config._asdict(), "blocks": entry.config.blocks._asdict()}
        entries.append({**record.pop("shape")._asdict(), **record, "config": config})
    return {**table._asdict(), "entries": entries}


def from_json(record: dict[str, Any]) -> Table:
    """The inverse of :func:`to_json`; raises ValueError, KeyError or TypeError where it is none."""
    entries = [_parse(**entry) for entry in record["entries"]]
    return Table(
        str(record["gpu"]),
        str(record["date"]),
        dict(record["versions"]),
        _positive(record["launch_seconds"]),
        {shape_class(*entry.shape): entry for entry in entries},
    )


def _parse(
    kind: str, layout: str, m: int, n: int, k: int, config: Any, **times: float
) -> Measurement:
    if kind not in KINDS or layout not in LAYOUTS:
        raise ValueError(f"there is no kind {kind!r} or layout {layout!r}")
    found = Config(**{**config, "blocks": Blocks(**config["blocks"])})
    *sizes, flatten, specialize, promote = found.blocks
    sizes += [m, n, k, found.group_m, found.split_k]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"sizes must be positive integers, got {sizes}")
    if type(promote) is not int or promote < 0 or {type(flatten), type(specialize)} != {bool}:
        raise ValueError(f"flatten, specialize and promote cannot be combined so: {found.blocks}")
    checked = {name: _positive(value) for name, value in times.items()}
    return Measurement(Shape(kind, layout, m, n, k), found, **checked)


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"times must be positive numbers, got {value!r}")
    number: float = value
    return number
