"""Size limits by which ``auto`` chooses an algorithm, measured on this machine.

``pipekernels tune`` saves them in a file in the user's cache folder. The rank that creates a
communicator's shared memory reads the file and stores the limit there, the same for all ranks.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

from pipekernels import _cache

FORMAT = 2  # Increase it when a change of the algorithms invalidates older measurements.


class Limits(NamedTuple):
    """Measured limits.

    Attributes:
        one_shot_bytes: by world size, the largest bytes for which ``one_shot`` is faster than
            ``two_shot``.
        date: of the measurement.
    """

    one_shot_bytes: dict[int, int]
    date: str

    def limit(self, world_size: int) -> int:
        """The limit measured with ``world_size`` ranks, or with the next smaller number."""
        measured = sorted(self.one_shot_bytes)
        nearest = max((size for size in measured if size <= world_size), default=measured[0])
        return self.one_shot_bytes[nearest]


def one_shot_bytes(world_size: int) -> int:
    """Up to how many bytes ``auto`` uses ``one_shot``; 0 (a built-in limit) if not measured."""
    limits = load()
    return 0 if limits is None else limits.limit(world_size)


def cpu_model() -> str:
    """The processor's name, with family and model if known: virtual machines may give processors of
    several generations the same name."""
    try:
        processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        processor = ""
    fields = dict(re.findall(r"^([^:\n]*?)\s*:[ \t]*(.*?)\s*$", processor, re.MULTILINE))
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in fields:
        return str(name)
    return f"{name} (family {fields['cpu family']}, model {fields.get('model')})"


def path() -> Path:
    """The file of this machine."""
    return _cache.file("all-reduce", f"{cpu_model()} {os.cpu_count()}c")


def load() -> Limits | None:
    """This machine's measurements; ``None`` without any, or, with a warning, if it is invalid."""
    return _cache.read(path(), FORMAT, _parse)


def save(limits: Limits) -> Path:
    """Write or replace the file of this machine, and return its path."""
    return _cache.write(path(), FORMAT, limits._asdict())


def _parse(record: dict[str, Any]) -> Limits:
    limits, date = record["one_shot_bytes"], record["date"]
    if not isinstance(limits, dict) or not limits or not isinstance(date, str):
        raise TypeError("one_shot_bytes must be sizes by world size, and date a text")
    if any(type(limit) is not int or not 0 < limit < 2**63 for limit in limits.values()):
        raise ValueError(f"sizes must be positive numbers of bytes, got {list(limits.values())}")
    if not all(re.fullmatch("[1-9][0-9]{0,8}", size) for size in limits):
        raise ValueError(f"world sizes must be positive integers, got {list(limits)}")
    return Limits({int(size): limit for size, limit in limits.items()}, date)
