"""Fair timing and records: alternating candidates, medians with spread, and their conditions."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipekernels import _cache
from pipekernels.comm.all_reduce_limits import cpu_model

RESULTS = Path(__file__).parent / "results"


def alternate(
    candidates: Mapping[str, Callable[[], float | Sequence[float] | None]],
    *,
    warmup: int,
    rounds: int,
    start: int = 0,
) -> dict[str, list[float]]:
    """Time all candidates in turn, so that drifts of the machine's speed affect all of them.

    The orders are Latin squares balanced for neighbours (E. J. Williams, 1949), one and its mirror
    image, as an odd number of candidates needs both. Over twice as many rounds as there are
    candidates, each follows every other one equally often: a predecessor affects the caches.

    Args:
        candidates: by name; each call is one sample. A candidate that times itself (without its
            set-up, or in another process) returns its seconds, or those of several samples;
            otherwise the whole call is timed.
        warmup: rounds whose samples are dropped.
        rounds: rounds whose samples are returned.
        start: number of rounds in earlier calls, whose orders this call continues.

    Returns:
        Seconds of all samples, by name.
    """
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    steps = [(i + 1) // 2 * (-1) ** (i + 1) for i in range(len(names))]  # 0, 1, -1, 2, -2, ...
    for round_ in range(start, start + warmup + rounds):
        side = (-1) ** (round_ // len(names))
        for name in (names[(round_ + side * step) % len(names)] for step in steps):
            begin = time.perf_counter()
            own = candidates[name]()
            seconds = time.perf_counter() - begin if own is None else own
            if round_ >= start + warmup:
                samples[name] += [seconds] if isinstance(seconds, float) else seconds
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and minimum of ``samples``, in their unit."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return {
        "median": statistics.median(samples),
        "p10": deciles[0],
        "p90": deciles[-1],
        "min": min(samples),
    }


def against(samples: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """A :func:`summary` of each candidate with its ``'speed-up over <base>'``, one of them."""
    found = {name: summary(seconds) for name, seconds in samples.items()}
    return {
        name: {**figures, f"speed-up over {base}": found[base]["median"] / figures["median"]}
        for name, figures in found.items()
    }


class Measured(NamedTuple):
    """One case of a benchmark.

    Attributes:
        case: its name.
        samples: of each candidate, in the order of its turns; seconds, unless the module has a
            ``UNIT``.
        rows: what the result file says about the case.
    """

    case: str
    samples: Mapping[str, Sequence[float]]
    rows: list[dict[str, Any]]


def compared(case: str, samples: Mapping[str, Sequence[float]], base: str) -> Measured:
    """A case whose rows are those of :func:`against`."""
    found = against(samples, base).items()
    rows = [{"case": case, "candidate": name, **figures} for name, figures in found]
    return Measured(case, samples, rows)


def ratios(samples: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """A :func:`summary` of ``base`` over ``samples``, turn by turn."""
    return summary([theirs / ours for theirs, ours in zip(base, samples, strict=False)])


def machine() -> dict[str, Any]:
    """Description of this machine."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    described: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return described | _gpu()


@functools.cache
def _gpu() -> dict[str, Any]:
    """The first GPU, its driver, and its current clocks; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = importlib.metadata.version("triton")
    fields = ["driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return found
    return found | dict(zip(fields, told.strip().split(", "), strict=False))


def machine_name(described: Mapping[str, Any]) -> str:
    """Folder name for a machine's results: its GPU, else its CPU and number of cores."""
    name = described.get("gpu") or f"{described['cpu']} {described['cores']}c"
    return _cache.slug(name)


def results_folder() -> Path:
    """Where this machine's results go: ``$OUT`` if set, else ``bench/results/<machine>``."""
    out = os.environ.get("OUT")
    return Path(out) if out else RESULTS / machine_name(machine())


def commit() -> str:
    """The git commit of the working tree, with ``+changes`` if files differ; without git,
    ``$COMMIT``."""
    folder = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "--", ":!/bench/results"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")
    return head + ("+changes" if changes else "")


def save(name: str, rows: Sequence[Mapping[str, Any]], conditions: Mapping[str, Any]) -> Path:
    """Write a result file into :func:`results_folder` and return its path.

    Args:
        name: the benchmark's name, the file's stem.
        rows: the results; times in seconds.
        conditions: of the measurement, such as threads, sizes and rounds.
    """
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {
        "name": name,
        "date": _cache.now(),
        "commit": commit(),
        "machine": machine(),
        "conditions": dict(conditions),
        "rows": [dict(row) for row in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
