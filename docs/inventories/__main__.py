"""``python docs/inventories`` writes the inventories by which Sphinx links torch and Python.

They list the names that this package's signatures and docstrings use, under which pages of the two
projects they stand, so that the build needs no network. A name that is missing is a warning of
``make docs``: add it here.
"""

from __future__ import annotations

import zlib
from pathlib import Path

# Where torch's own names stand, and the names under which Python and our docstrings know them.
TORCH = {
    "tensors.html#torch.Tensor": ["torch.Tensor", "Tensor"],
    "tensor_attributes.html#torch.device": ["torch.device"],
    "tensor_attributes.html#torch.dtype": ["torch.dtype"],
    "optim.html#torch.optim.Optimizer": [
        "torch.optim.Optimizer",
        "torch.optim.optimizer.Optimizer",
    ],
    "distributed.html#torch.distributed.Store": ["torch.distributed.distributed_c10d.Store"],
    "distributed.html#module-torch.distributed": [
        "torch.distributed.distributed_c10d.ProcessGroup",
        "dist.ProcessGroup",
    ],
    "distributed.html#torch.distributed.device_mesh.DeviceMesh": ["DeviceMesh"],
    "generated/torch.nn.Module.html#torch.nn.Module": [
        "torch.nn.Module",
        "torch.nn.modules.module.Module",
        "nn.Module",
    ],
    "generated/torch.nn.parameter.Parameter.html#torch.nn.parameter.Parameter": [
        "torch.nn.parameter.Parameter"
    ],
    "generated/torch.nn.Sequential.html#torch.nn.Sequential": [
        "torch.nn.modules.container.Sequential"
    ],
    "generated/torch.nn.Linear.html#torch.nn.Linear": ["torch.nn.modules.linear.Linear"],
    "generated/torch.nn.Embedding.html#torch.nn.Embedding": ["torch.nn.modules.sparse.Embedding"],
    "generated/torch.nn.MultiheadAttention.html#torch.nn.MultiheadAttention": [
        "torch.nn.modules.activation.MultiheadAttention"
    ],
}
PYTHON = {
    f"library/{module}.html#{module}.{name}": [f"{module}.{name}"]
    for module, names in {
        "collections.abc": ("Callable", "Iterable", "Iterator", "Mapping", "Sequence"),
        "contextlib": ("AbstractContextManager",),
        "os": ("PathLike",),
        "pathlib": ("Path",),
    }.items()
    for name in names
}


def inventory(project: str, pages: dict[str, list[str]]) -> bytes:
    """The names in the format of Sphinx's ``objects.inv``."""
    header = (
        f"# Sphinx inventory version 2\n# Project: {project}\n# Version:\n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    entries = "".join(
        f"{name} py:class 1 {page} -\n" for page, names in pages.items() for name in names
    )
    return header.encode() + zlib.compress(entries.encode(), 9)


if __name__ == "__main__":
    for project, pages in (("torch", TORCH), ("python", PYTHON)):
        Path(__file__).with_name(f"{project}.inv").write_bytes(inventory(project, pages))
