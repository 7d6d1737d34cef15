"""The benchmarks by name.

A benchmark is a module of this folder, or of ``bench/pipeline``, that has

* ``CANDIDATES``: of each case, by its name; ``QUICK``: those of the quick form;
* ``measure(plan, quick)``: yields a :class:`bench.harness.Measured` for each case of ``plan``, a
  part of ``CANDIDATES`` or ``QUICK``, in its order;
* ``BASE``: the candidate that the others are compared with;
* ``CONDITIONS`` and ``table(rows)``, for the result file and the page made of it; ``plot(rows,
  path)``, if there is a plot;
* ``OPERATION``, if its tests are named after something else than the module; ``UNIT`` of its
  samples, if that is not ``"seconds"``.
"""

from __future__ import annotations

import functools
import importlib
from itertools import chain
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent


@functools.cache
def names() -> dict[str, str]:
    """The module of each benchmark, by name: those that define ``measure(plan, quick)``."""
    files = {path.stem: path for path in chain(FOLDER.glob("*.py"), FOLDER.glob("pipeline/*.py"))}
    return {
        name: ".".join(("bench", *path.relative_to(FOLDER).with_suffix("").parts))
        for name, path in sorted(files.items())
        if "\ndef measure(plan" in path.read_text()
    }


def find(name: str) -> ModuleType:
    """The module that measures ``name``, draws it and writes it down; ``bench.<name>`` for what is
    measured by a program of its own."""
    return importlib.import_module(names().get(name, f"bench.{name}"))


def operation(name: str) -> str:
    """What the tests of a benchmark are named after."""
    found: str = getattr(find(name), "OPERATION", name)
    return found


def unit(name: str) -> str:
    """The unit of a benchmark's samples."""
    found: str = getattr(find(name), "UNIT", "seconds")
    return found
