"""The ``pipekernels`` command: reports what is installed and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import sys
import warnings
from pathlib import Path

import torch

from pipekernels import _backend
from pipekernels._version import __version__
from pipekernels.triton_kernels.config import TRITON_REMEDY, has_triton


def info() -> str:
    """A report for users: versions, build, devices, remedies; its last line is for bug reports."""
    built: dict[str, str | bool] = {}
    missing: list[str] = []
    rows = [("pipekernels", __version__)]
    try:
        built = _backend.build_info()
    except ImportError as error:
        rows.append(("extension", "missing"))
        missing.append(str(error))
    else:
        rows.append(("extension", f"built by {built['compiler']}"))
        rows.append(("CUDA backend", _cuda_backend(built)))
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    rows.append(("Python", f"{platform.python_version()}, {machine}"))
    rows.append(("torch", f"{torch.__version__}, {cuda}"))
    rows.append(("triton", _triton()))
    used = f"{cores} of {os.cpu_count()} cores, {threads} intra-op threads"
    rows.append(("CPU", f"{cpu_model()}, {used}"))
    # torch warns of GPUs that it does not support; the report lists that with what is missing.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows += _gpus()
    has_gpus = torch.cuda.is_available()
    if has_gpus and not has_triton():
        missing.append(f"The sharded GEMM needs {TRITON_REMEDY}")
    if built and built["cuda"] and torch.cuda.device_count() > 1:
        rows.append(("GPU links", _links(torch.cuda.device_count())))
    missing += [str(warning.message) for warning in caught]
    if built and not built["cuda"] and has_gpus:
        missing.append(
            "There are GPUs, but the extension was built without CUDA. Install a CUDA toolkit, set "
            "CUDA_HOME to it and run `PIPEKERNELS_CUDA=1 pip install --force-reinstall .`"
        )
    if built and built["cuda"] and not has_gpus:
        missing.append(
            "The CUDA backend is built but torch sees no GPU: "
            + ("check `nvidia-smi`." if torch.version.cuda else "this torch is a CPU-only build.")
        )
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"\n! {text}" for text in missing]
    in_one_line = " | ".join(f"{name} {value}" for name, value in rows)
    return "\n".join([*lines, "\nFor bug reports:", in_one_line])


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


def _cuda_backend(built: dict[str, str | bool]) -> str:
    if not built["cuda"]:
        return "not built (no GPU or no CUDA toolkit was found, or PIPEKERNELS_CUDA=0)"
    architectures = str(built["cuda_architectures"]).replace("-real", "").split()
    return f"built with CUDA {built['cuda_version']} for sm_{', sm_'.join(architectures)}"


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "not installed (only needed on GPUs)"
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "a nightly build"


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none")]
    rows = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        architecture, memory = f"sm_{device.major}{device.minor}", device.total_memory / 2**30
        rows.append((f"GPU {index}", f"{device.name}, {architecture}, {memory:.0f} GiB"))
    return rows


def _links(n: int) -> str:
    """The pairs of GPUs that NVLink joins, also through switches."""
    joined = [f"{a}-{b}" for b in range(n) for a in range(b) if _backend.load().has_nvlink(a, b)]
    return f"NVLink between {', '.join(joined) or 'none'}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``pipekernels`` and ``python -m pipekernels``; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["run"]:
        return _run(arguments[1:])
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1:])
    parser = argparse.ArgumentParser(prog="pipekernels", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pipekernels {__version__}")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("run", help="torchrun, with each rank bound to its share of the cores")
    commands.add_parser("serve", help="answers OpenAI's API with a model over the ranks of a host")
    commands.add_parser("info", help="versions, what was built, devices, and what is missing")
    parsed = parser.parse_args(arguments)
    print(parser.format_help().rstrip() if parsed.command is None else info())
    return 0


def _run(arguments: list[str], name: str = "run") -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from pipekernels.numa.run import run

    try:
        run(arguments)
    except (ValueError, ChildFailedError) as error:
        print(f"pipekernels {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _serve(arguments: list[str]) -> int:
    """Start the ranks of a server by ``pipekernels run``; or be one, where that has started it."""
    parser = argparse.ArgumentParser(
        prog="pipekernels serve",
        description="Answers OpenAI's API with a model of transformers over the cores of a host.",
    )
    parser.add_argument("folder", help="of config, tokenizer and safetensors files")
    parser.add_argument("--ranks", default="auto", help="default: one for each memory node")
    parser.add_argument("--bits", type=int, choices=(8, 4), help="quantize the weights")
    parser.add_argument("--dtype", default="auto", help="such as bfloat16; default: the files'")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this host only")
    parser.add_argument("--port", default=8000, type=int, help="default: %(default)s; 0: any free")
    parser.add_argument(
        "--cache-tokens", type=int, help="of all requests together; default: what memory holds"
    )
    options = parser.parse_args(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from pipekernels.huggingface.serving import serve

        serve(options)
    needed = ("transformers", "fastapi", "openai", "uvicorn")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} missing; run pip install 'pipekernels[serving]'")
    if not Path(options.folder, "config.json").is_file():
        parser.error(f"{options.folder} has no config.json; give the folder of a downloaded model")
    if not any(Path(options.folder).glob("*token*")):
        parser.error(f"{options.folder} has no tokenizer; save or copy the model's into it")
    if options.dtype != "auto" and not isinstance(getattr(torch, options.dtype, 0), torch.dtype):
        parser.error(f"--dtype must be auto or a dtype of torch, got {options.dtype!r}")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        socket.create_server((options.host, options.port), family=family).close()
    except (OSError, OverflowError) as error:
        parser.error(f"cannot listen on {options.host}, port {options.port}: {error}")
    from torch.distributed.elastic.multiprocessing import SignalException

    command = ["--standalone", "--nproc-per-node", options.ranks, "--module", "pipekernels"]
    try:
        return _run([*command, "serve", *arguments], "serve")
    except SignalException:  # The ranks have ended.
        return 0
