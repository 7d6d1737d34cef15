"""The enumerations of the extension: which dtypes and operations there are, and their codes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pipekernels import _backend


class Codes(NamedTuple):
    """Codes by name, of csrc/include/pipekernels: elements/dtype.h and collectives/call.h."""

    movable: dict[torch.dtype, int]  # Without the dtypes that this version of torch does not have.
    reducible: dict[torch.dtype, int]  # On all devices.
    reductions: dict[str, int]  # In both orders; those from "product" on are for CPUs.
    operations: dict[str, int]  # The reductions that callers of a communicator name.
    orders: dict[str, int]
    algorithms: dict[str, int]
    calls: dict[str, int]


@functools.cache
def codes() -> Codes:
    """The codes, from the extension: not at import, as the package can be imported without it."""
    module = _backend.load()
    return Codes(
        _dtypes(module.DTYPES),
        _dtypes(module.REDUCIBLE_DTYPES),
        _numbered(module.REDUCTIONS),
        _numbered(module.OPERATIONS),
        _numbered(module.ORDERS),
        _numbered(module.ALGORITHMS),
        _numbered(module.CALLS),
    )


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: code for code, name in enumerate(names)}


def _dtypes(names: Sequence[str]) -> dict[torch.dtype, int]:
    found = _numbered(names).items()
    return {getattr(torch, name): code for name, code in found if hasattr(torch, name)}


def reduction_in(op: str, order: str) -> str:
    """The name of the reduction ``op`` in ``order``."""
    return f"{op} in tree order" if order == "tree" and op in ("sum", "avg") else op


def operation_of(reduction: str) -> str:
    """The ``op`` of a reduction, without its order."""
    return reduction.removesuffix(" in tree order")
