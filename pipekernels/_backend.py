"""The only importer of the compiled extension ``pipekernels._C``."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from pipekernels._torch_private import increment_version
from pipekernels._version import __version__

if TYPE_CHECKING:  # At run time load() imports the extension when it is first needed.
    from pipekernels import _C

    Communicator = _C.Communicator
    CudaCommunicator = _C.CudaCommunicator
    Message = _C.Message
    Segment = _C.Segment

_REMEDY = "Build it with `pip install .` (or `pip install -e .`) in the pipekernels source folder."


python_kernels: dict[str, Callable[..., object]] = {}
"""By names of operators of torch that the extension has kernels for, those in Python, which its own
call for what they do not take. They take and give references (``_torch_private.reference_to``)."""


@functools.cache
def load() -> ModuleType:
    """Return ``pipekernels._C``.

    Raises:
        ImportError: the extension is missing, cannot be loaded, or has another version.
    """
    try:
        module = importlib.import_module("pipekernels._C")
    except ImportError as error:
        folder = Path(__file__).parents[1]
        is_source = (folder / "setup.py").exists()
        leave = f"If it is installed, leave the source folder {folder}. " if is_source else ""
        raise ImportError(f"pipekernels._C cannot be loaded ({error}). {leave}{_REMEDY}") from error
    built = module.build_info()
    if built["version"] != __version__:
        raise ImportError(
            f"pipekernels._C was built for version {built['version']}, the package is "
            f"{__version__}. {_REMEDY}"
        )
    module.use_tensors(torch.Tensor, torch.nn.Parameter, increment_version)
    module.register_operators(python_kernels)
    return module


def build_info() -> dict[str, str | bool]:
    """Version, compiler and CUDA settings that the extension was built with."""
    info: dict[str, str | bool] = load().build_info()
    return info


def has_cuda() -> bool:
    """Whether the extension was built with CUDA, regardless of devices."""
    return bool(build_info()["cuda"])


def require_cuda(device: torch.device | None = None) -> None:
    """Raise RuntimeError unless CUDA operations can run, on ``device`` if one is given."""
    if not has_cuda():
        raise RuntimeError(
            "CUDA tensors need an extension built with CUDA, and this one was built without: "
            "reinstall pipekernels where nvcc is found (with PIPEKERNELS_CUDA=1 a build without "
            "it fails)"
        )
    if device is None:
        return
    if not torch.backends.cuda.is_built():
        raise RuntimeError(
            f"torch {torch.__version__} was built without CUDA; install a build for CUDA"
        )
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device, or no driver for it; see nvidia-smi")
    built = [int(digits) for digits in re.findall(r"\d+", str(build_info()["cuda_architectures"]))]
    major, minor = torch.cuda.get_device_capability(device)
    if built and 10 * major + minor < min(built):
        raise RuntimeError(
            f"{device} has compute capability {major}.{minor}, and this build of pipekernels "
            f"begins at {min(built) // 10}.{min(built) % 10}; rebuild it with "
            f"CUDAARCHS={major}{minor}"
        )
