"""Makes the backend ``pipekernels`` of torch.distributed known without an import of the package.

``import torch`` calls :func:`register`, by the entry point in the group ``torch.backends`` that
pyproject.toml declares. So it must cost nothing and may not fail: the package, which itself imports
torch, is imported when the first group is made. So this module is outside the package.

``PIPEKERNELS_AUTOLOAD=0`` turns it off, ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` all such entry points.
One reason: where any backend is registered, torch 2.13 gives groups such as ``"cpu:gloo"`` no
default backend, and warns ("No backend of type 0 found"); their collectives work all the same.
"""

import logging
import os
from typing import Any


def register() -> None:
    """Register the backend with a function that imports the package when it makes a group."""
    if os.environ.get("PIPEKERNELS_AUTOLOAD", "1") == "0":
        return
    try:
        import torch.distributed as dist

        if dist.is_available():
            register_backend = dist.Backend.register_backend
            register_backend("pipekernels", _make_group, extended_api=True, devices=["cpu"])
    except Exception:  # Of a torch that is not known yet: torch itself must remain usable.
        message = "the backend pipekernels was not registered with torch.distributed"
        logging.getLogger("pipekernels").debug(message, exc_info=True)


def _make_group(options: Any, backend_options: Any) -> Any:
    from pipekernels.distributed.backend import make_group

    return make_group(options, backend_options)
