"""Ranges that torch.profiler, or NVTX through it, shows while it watches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from pipekernels._torch_private import is_profiler_enabled


def in_profile(text: str, *arguments: object) -> AbstractContextManager[Any]:
    """A range named ``pipekernels::`` and ``text % arguments``, if the calling thread's work is
    profiled."""
    if not is_profiler_enabled():
        return nullcontext()
    return record_function(f"pipekernels::{text % arguments}")
