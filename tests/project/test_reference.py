"""The reference has a page for each public object."""

import collections
import importlib
import inspect
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

DOCS = Path(__file__).parents[2] / "docs"
MODULES = (
    "pipekernels",
    "pipekernels.balance",
    "pipekernels.batchnorm",
    "pipekernels.huggingface",
    "pipekernels.ops",
    "pipekernels.tensor_parallel.functional",
    "pipekernels.skip",
    "pipekernels.tensor_parallel",
)
TABLE = re.compile(r"^\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", re.MULTILINE)


def named() -> list[str]:
    """The full names in the tables of the reference."""
    found = []
    for name in re.findall(r"^(reference/\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE):
        page = (DOCS / f"{name}.md").read_text()
        for block in TABLE.finditer(page):
            module = re.findall(
                r"^\.\. currentmodule:: (\S+)$", page[: block.start()], re.MULTILINE
            )[-1]
            found += [f"{module}.{entry.strip().lstrip('~')}" for entry in block[1].splitlines()]
    return found


def resolved(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_object_has_one_page() -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    public = {
        id(value): f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(module).__all__
        if not inspect.ismodule(value := resolved(f"{module}.{name}")) and name != "__version__"
    }
    counted = collections.Counter(id(resolved(name)) for name in named())
    assert counted == dict.fromkeys(public, 1)
