"""The ``pipekernels`` command: what is installed here, what it can do, and what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform

import torch

from pipekernels import _backend
from pipekernels._version import __version__


def info() -> str:
    """A report for people and for bug reports: versions, build, devices, remedies."""
    rows: list[tuple[str, str]] = [("pipekernels", __version__)]
    missing: list[str] = []
    try:
        built = _backend.build_info()
    except ImportError as error:
        built = {}
        rows.append(("extension", "missing"))
        missing.append(str(error))
    else:
        rows.append(("extension", f"built by {built['compiler']}"))
        rows.append(("CPU backend", "built"))
        rows.append(("CUDA backend", _cuda_backend(built)))
    rows.append(
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    )
    rows.append(("torch", _torch()))
    rows.append(("triton", _triton(missing)))
    cores = len(os.sched_getaffinity(0))
    rows.append(("CPU", f"{cores} cores, {torch.get_num_threads()} intra-op threads"))
    rows += _gpus()
    if built and not built["cuda"] and torch.cuda.is_available():
        missing.append(
            "There are GPUs, but the extension was built without CUDA. Install a CUDA toolkit, set "
            "CUDA_HOME to it and run `PIPEKERNELS_CUDA=1 pip install --force-reinstall .`"
        )
    if built and built["cuda"] and not torch.cuda.is_available():
        missing.append(
            "The CUDA backend is built but torch sees no GPU: "
            + ("check `nvidia-smi`." if torch.version.cuda else "this torch is a CPU-only build.")
        )
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, *(f"\n! {text}" for text in missing)])


def _cuda_backend(built: dict[str, str | bool]) -> str:
    if not built["cuda"]:
        return "not built (no CUDA toolkit was found, or PIPEKERNELS_CUDA=0)"
    architectures = str(built["cuda_architectures"]).replace("-real", "").split()
    return f"built with CUDA {built['cuda_version']} for sm_{', sm_'.join(architectures)}"


def _torch() -> str:
    if torch.version.cuda is None:
        return f"{torch.__version__}, CPU only"
    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def _triton(missing: list[str]) -> str:
    if importlib.util.find_spec("triton") is not None:
        from importlib.metadata import version

        return version("triton")
    if torch.cuda.is_available():
        missing.append("The sharded GEMM needs Triton: pip install 'pipekernels[triton]'")
    return "not installed (only needed on GPUs)"


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none")]
    rows = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        architecture, memory = f"sm_{device.major}{device.minor}", device.total_memory / 2**30
        rows.append((f"GPU {index}", f"{device.name}, {architecture}, {memory:.0f} GiB"))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``pipekernels`` and ``python -m pipekernels``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pipekernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what was built, devices, and what is missing")
    parser.parse_args(arguments)
    print(info())
    return 0
