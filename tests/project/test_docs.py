"""The programs of docs/ run, and what its pages name exists; make docs checks links between pages.

The Python programs of a page run one after another, as one program; on a page that begins with
``<!-- ranks: N -->``, in each of N processes with torchrun's environment. Programs that begin with
``# On GPUs`` are compiled only.
"""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.programs import run_program

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = sorted([*(ROOT / "pipekernels").rglob("*.py"), *ROOT.glob("pipekernels*.py")])
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOR_GPUS = "# On GPUs\n"
VARIABLE = re.compile(r"\bPIPEKERNELS_[A-Z_]+\b")
# test_migration.py runs the programs of that page.
WITH_PROGRAMS = [name for name in PAGES if PROGRAM.search(PAGES[name]) and name != "migration.md"]
ALL = PAGES | {
    f"../{name}.md": (ROOT / f"{name}.md").read_text() for name in ("README", "CONTRIBUTING")
}

pytestmark = pytest.mark.project


def program(page: str) -> str:
    """Its programs, but those for GPUs."""
    return "\n".join(each for each in PROGRAM.findall(page) if not each.startswith(FOR_GPUS))


@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_programs_for_gpus_compile(name: str) -> None:
    for each in PROGRAM.findall(PAGES[name]):
        compile(each, name, "exec")


def ranks(name: str) -> int | None:
    """How many processes run the page's programs, if not this one."""
    match = re.match(r"<!-- ranks: (\d+) -->", PAGES[name])
    return int(match[1]) if match else None


RUN = [name for name in WITH_PROGRAMS if program(PAGES[name]).strip()]


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    """The program of a page, in a folder of its own."""
    text = program(PAGES[name])
    for module in ("transformers", "pipekernels.distributed"):
        if re.search(rf"^(?:from|import) {re.escape(module)}\b", text, re.MULTILINE):
            pytest.importorskip(module, exc_type=ImportError)
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN if not ranks(name)])
def test_programs_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            runpy.run_path(str(path))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN if ranks(name)])
def test_programs_of_ranks_run(name: str, path: Path) -> None:
    run_program(path, folder=path.parent, ranks=ranks(name))


@pytest.mark.parametrize("name", ALL)
def test_links_out_of_docs_exist(name: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)[)#]", ALL[name]):
        assert ((DOCS / name).parent / link).exists(), link


def strings(text: str) -> Iterator[str]:
    """The string literals of a Python file, with ``...`` for what is put into them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values
            )


def test_errors_of_the_troubleshooting_page_are_raised() -> None:
    python = [*PACKAGE, ROOT / "csrc" / "cmake" / "build_extension.py"]
    known = [string for path in python for string in strings(path.read_text())]
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        known += re.findall(r'"([^"\n]*)"', path.read_text())
    for error in re.findall(r"^### `(.*)`$", PAGES["guides/troubleshooting.md"], re.MULTILINE):
        text = error.removeprefix("...").strip()
        assert any(text in string for string in known), error


def test_all_environment_variables_are_listed() -> None:
    """Those of the package and of its build, by their prefix."""
    sources = [*PACKAGE, *(ROOT / "csrc" / "cmake").glob("*.py")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    rows = re.findall(r"^\| `.*", PAGES["guides/environment.md"], re.MULTILINE)
    assert {name for row in rows for name in VARIABLE.findall(row)} == read
