"""The public names and their signatures are those in ``public_names.txt``, and in the reference.

A change must be deliberate: give it a line in CHANGELOG.md, and write the list again by ``python
tests/project/test_public_names.py``.
"""

import collections
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.project

LIST = Path(__file__).parent / "public_names.txt"
DOCS = Path(__file__).parents[2] / "docs"
TABLE = re.compile(r"^\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", re.MULTILINE)
# An object that is in several of these is described in the first.
MODULES = [
    "pipekernels",
    "pipekernels.balance",
    "pipekernels.batchnorm",
    "pipekernels.comm",
    "pipekernels.distributed",
    "pipekernels.ops",
    "pipekernels.tensor_parallel.functional",
    "pipekernels.pipeline",
    "pipekernels.skip",
    "pipekernels.tensor_parallel",
    "pipekernels.huggingface",
]

# Users get instances of these classes from methods; the constructors are private.
PRIVATE_CONSTRUCTORS = {"Communicator", "Timeline"}


def names_of(module: ModuleType) -> list[str]:
    """The names in ``__all__``; without it, the public names that the module defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def signature_of(value: Any) -> str:
    """Names, kinds and defaults of the parameters, without annotations."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def members_of(cls: type) -> dict[str, Any]:
    """Public members of ``cls`` that it or a base class of this package defines."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("pipekernels"):
            members |= {k: v for k, v in vars(base).items() if not k.startswith("_")}
    return members


def lines_of(name: str, value: Any) -> Iterator[str]:
    """One line for ``value``, and one for each public member of a class."""
    if isinstance(value, ModuleType):
        yield f"{name}: module"
    elif inspect.isclass(value):
        yield f"{name}: class" + (
            "" if value.__name__ in PRIVATE_CONSTRUCTORS else signature_of(value)
        )
        for member, found in sorted(members_of(value).items()):
            if isinstance(found, property):
                yield f"{name}.{member}: property"
            elif isinstance(found, (staticmethod, classmethod)):
                kind = type(found).__name__
                yield f"{name}.{member}: {kind}{signature_of(found.__func__)}"
            elif callable(found):
                yield f"{name}.{member}{signature_of(found)}"
    elif callable(value):
        yield f"{name}{signature_of(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def listing() -> str:
    lines: list[str] = []
    described: dict[int, str] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        for name in names_of(module):
            value = getattr(module, name)
            if id(value) in described:
                lines.append(f"{path}.{name}: {described[id(value)]}")
                continue
            described[id(value)] = f"{path}.{name}"
            lines += lines_of(f"{path}.{name}", value)
    return "\n".join(lines) + "\n"


def test_public_names_and_signatures_are_those_listed() -> None:
    assert listing().splitlines() == LIST.read_text().splitlines()


def in_reference() -> list[str]:
    """The full names in the tables of the reference."""
    found = []
    for name in re.findall(r"^(reference/\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE):
        page = (DOCS / f"{name}.md").read_text()
        for block in TABLE.finditer(page):
            above = page[: block.start()]
            module = re.findall(r"^\.\. currentmodule:: (\S+)$", above, re.MULTILINE)[-1]
            found += [f"{module}.{entry.strip().lstrip('~')}" for entry in block[1].splitlines()]
    return found


def test_every_public_object_has_one_page() -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    modules = [importlib.import_module(name) for name in MODULES]
    public = {
        id(value): f"{module.__name__}.{name}"
        for module in modules
        for name in getattr(module, "__all__", ())
        if not inspect.ismodule(value := getattr(module, name)) and name != "__version__"
    }
    counted = collections.Counter(id(pkgutil.resolve_name(name)) for name in in_reference())
    assert counted == dict.fromkeys(public, 1)


if __name__ == "__main__":
    LIST.write_text(listing())
