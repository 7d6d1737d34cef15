"""Result files: figures with the machine, versions, commit and conditions they come from."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from pipekernels.cli import cpu_model

RESULTS = Path(__file__).parent / "results"
# What people call a processor, by what /proc/cpuinfo has.
COMMON_NAMES = {
    "AMD EPYC (family 26, model 2)": "Zen 5 Turin",
    "AMD EPYC (family 25, model 17)": "Zen 4 Genoa",
    "AMD EPYC (family 25, model 1)": "Zen 3 Milan",
    "AMD EPYC (family 23, model 1)": "Zen 1 Naples",
    "Intel(R) Xeon(R) Processor (family 6, model 207)": "Emerald Rapids",
}


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
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def common_name(described: Mapping[str, Any]) -> str:
    """What people call a machine's processor, or its GPU."""
    cpu = str(described["cpu"])
    return str(described.get("gpu") or COMMON_NAMES.get(cpu, cpu))


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


def text_of(record: Mapping[str, Any]) -> str:
    """JSON with a line for each field, and for each row."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    fields = [f" {json.dumps(key)}: {json.dumps(record[key])}" for key in record if key != "rows"]
    return "{\n" + ",\n".join([*fields, f' "rows": [\n{rows}\n ]']) + "\n}\n"


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
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine(),
        "conditions": dict(conditions),
        "rows": rows,
    }
    path.write_text(text_of(record))
    return path


def read(path: Path) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def load(name: str) -> list[dict[str, Any]]:
    """The result files of a benchmark, of all machines, the newest first; a ValueError if one was
    measured in a tree with uncommitted changes. On a GPU it is a copy of the tree, and the page
    says so."""
    found = [read(path) for path in RESULTS.glob(f"*/{name}.json")]
    for record in found:
        if record["commit"].endswith("+changes") and "gpu" not in record["machine"]:
            where = f"{machine_name(record['machine'])}/{name}.json"
            raise ValueError(f"{where} is of {record['commit']}; commit, and measure again")
    return sorted(found, key=lambda record: str(record["date"]), reverse=True)
