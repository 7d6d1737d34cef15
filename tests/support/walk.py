"""Which functions of Python a call goes through."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pipekernels

ROOT = f"{Path(pipekernels.__file__).parents[1]}/"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def python_calls(call: Callable[[], Any]) -> list[str]:
    """The functions of Python that ``call()`` calls, in order: file, line and name. Without
    comprehensions, whose frames depend on Python's version."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS:
            file = code.co_filename.removeprefix(ROOT)
            names.append(f"{file}:{code.co_firstlineno} {code.co_name}")

    gc.disable()  # Finalizers that it calls would be counted.
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names


def is_own(name: str) -> bool:
    """Whether a function that :func:`python_calls` names is one of the package."""
    return name.startswith("pipekernels/")
