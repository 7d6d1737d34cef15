"""Reports what GPU results depend on: the device, its clocks, and software versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess

import torch

from bench import records
from pipekernels.local_ops.gemm_choice import tf32_allowed

PACKAGES = [
    "triton", "numpy", "pytest", "pytest-timeout", "hypothesis", "pybind11", "cmake", "ninja",
]  # fmt: skip
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit"
QUERY = f"driver_version,pstate,{CLOCKS},ecc.mode.current,compute_mode,mig.mode.current,memory.used"


def answer(*command: str) -> str:
    """The output of ``command``, or why there is none."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer in 20 s"
    return (done.stdout + done.stderr).strip()


def nccl() -> tuple[int, ...] | None:
    """The version of NCCL that torch uses, if it has any."""
    try:
        return tuple(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return None


def report() -> str:
    """The whole report, as text."""
    has_gpu = torch.cuda.is_available()
    rows = [
        f"{torch.cuda.get_device_properties(0)}" if has_gpu else "there is no GPU",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl() if has_gpu else None}",
        f"TF32 in matmul: {tf32_allowed()}",
        *(f"{name} {_version(name)}" for name in PACKAGES),
        f"{len(os.sched_getaffinity(0))} cores, {os.cpu_count()} in the machine",
        answer("nvcc", "--version"),
        answer("compute-sanitizer", "--version"),
        answer("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"),
        answer("nvidia-smi"),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if _matters(name)),
    ]
    return "\n".join(rows)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _matters(name: str) -> bool:
    return name.startswith(("CUDA", "NCCL", "PIPEKERNELS", "PYTORCH", "TORCH", "TRITON", "OMP"))


def main() -> None:
    """Print the report, or with ``--brief`` only what `make gpu-check` needs, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brief", action="store_true")
    if not parser.parse_args().brief:
        print(report())
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA GPU")
    gpu = torch.cuda.get_device_properties(0)
    brief = {
        "architecture": f"{gpu.major}{gpu.minor}",
        "sms": gpu.multi_processor_count,
        "folder": str(records.results_folder()),
    }
    print(json.dumps(brief))


if __name__ == "__main__":
    main()
