"""The only door to the compiled extension ``pipekernels._C``."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from pipekernels._version import __version__

_REMEDY = "Build it with `pip install .` (or `pip install -e .`) in the pipekernels source folder."


@functools.cache
def load() -> ModuleType:
    """Return ``pipekernels._C``.

    Raises:
        ImportError: the extension is missing, cannot be loaded, or is of another version.
    """
    try:
        module = importlib.import_module("pipekernels._C")
    except ImportError as error:
        raise ImportError(f"pipekernels._C cannot be loaded ({error}). {_REMEDY}") from error
    built = module.build_info()["version"]
    if built != __version__:
        raise ImportError(
            f"pipekernels._C was built for version {built}, the package is {__version__}. {_REMEDY}"
        )
    return module


def build_info() -> dict[str, str | bool]:
    """Version, compiler and CUDA settings that the extension was built with."""
    return load().build_info()


def has_cuda() -> bool:
    """Whether the extension was built with CUDA; says nothing about devices."""
    return bool(build_info()["cuda"])


def require_cuda() -> None:
    """Raise RuntimeError unless the extension was built with CUDA."""
    if not has_cuda():
        raise RuntimeError(
            "CUDA tensors need an extension built with CUDA, and this one was built without: "
            "reinstall pipekernels where nvcc is found (with PIPEKERNELS_CUDA=1 a build without it fails)"
        )
