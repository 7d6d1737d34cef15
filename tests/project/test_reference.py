"""The reference has a page for each public object; its inventories are current."""

import collections
import importlib
import inspect
import re
import runpy
import zlib
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
    "pipekernels.ops.tensor_parallel",
    "pipekernels.skip",
    "pipekernels.tensor_parallel",
)
TABLE = re.compile(r"^\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", re.MULTILINE)


def named() -> list[str]:
    """The full names in the tables of the reference, in the sidebar's order."""
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


def test_the_objects_that_users_begin_with_come_first() -> None:
    assert [name.split(".")[-1] for name in named()[:2]] == ["Pipe", "tensor_parallelize"]


def test_no_title_stands_twice_in_the_sidebar() -> None:
    pages = re.findall(r"^((?:\w+/)?\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    titles = [
        match[1]
        for page in pages
        if (match := re.match(r"(?:<!--.*-->\n)?# (.*)\n", (DOCS / f"{page}.md").read_text()))
    ]
    titles += [name.split(".")[-1] for name in named()]
    assert len(titles) > 60
    assert [title for title, count in collections.Counter(titles).items() if count > 1] == []


def entries(inventory: bytes) -> list[bytes]:
    """The names in an inventory, whose last part zlib's versions compress differently."""
    return zlib.decompress(inventory.split(b"zlib.\n", 1)[1]).splitlines()


def test_inventories_are_those_that_the_script_writes() -> None:
    script = runpy.run_path(str(DOCS / "inventories" / "__main__.py"))
    for project in ("torch", "python"):
        stored = (DOCS / "inventories" / f"{project}.inv").read_bytes()
        assert entries(stored) == entries(script["inventory"](project, script[project.upper()]))


@pytest.mark.parametrize("path", sorted((DOCS / "rationale").glob("*.md")), ids=lambda p: p.stem)
def test_a_decision_takes_at_most_ten_lines(path: Path) -> None:
    sections = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections if path.stem != "facts" else ():
        title, _, body = section.partition("\n")
        assert re.findall(r"^\*\*(\w+)", body, re.MULTILINE)[:2] == ["Problem", "Decision"], title
        assert len([line for line in body.splitlines() if line]) <= 10, title


def test_every_measured_fact_names_files_that_exist() -> None:
    facts = (DOCS / "rationale" / "facts.md").read_text().split("\n* ")[1:]
    assert len(facts) > 15
    for fact in facts:
        files = re.findall(r"`([\w-]+(?:/[\w.-]+)+|pipekernels_autoload\.py)`", fact)
        assert files, fact
        assert all((DOCS.parent / file).is_file() for file in files), files
