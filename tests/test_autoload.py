"""torch finds the backend by the entry point of an installed package, without an import."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.programs import python
from torch.torch_version import TorchVersion

import pipekernels_autoload

ROOT = Path(__file__).parents[1]
needs_torch_2_7 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="groups of the backend need torch 2.7"
)


def test_a_torch_without_distributed_has_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(dist, "is_available", lambda: False)
    pipekernels_autoload.register()
    assert not calls
    monkeypatch.setattr(dist, "is_available", lambda: True)
    pipekernels_autoload.register()
    assert [name for name, _ in calls] == ["pipekernels"]


def test_torch_can_be_imported_though_the_backend_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist.Backend, "register_backend", lambda name: None)  # A later signature.
    pipekernels_autoload.register()


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., str]:
    """Starts Python where the package is installed; returns what it prints, errors included.

    What pip would install is described by pyproject.toml's own tables.
    """
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["torch.backends"]
    modules = {value.partition(":")[0] for value in points.values()}
    assert modules <= set(project["tool"]["setuptools"]["py-modules"]), "it would not be installed"
    info = tmp_path / "pipekernels-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pipekernels\nVersion: 0.0.0\n")
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (info / "entry_points.txt").write_text("".join(["[torch.backends]\n", *lines]))

    def start(*arguments: str, **env: str) -> str:
        paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        done = python(*arguments, code=None, cwd=tmp_path, env={**os.environ, **paths, **env})
        return done.stdout + done.stderr

    return start


@pytest.fixture
def run(start: Callable[..., str]) -> Callable[..., str]:
    """Runs a program; warnings are errors."""
    return functools.partial(start, "-W", "error", "-c")


SHOW = """
import sys, torch, torch.distributed as dist
print(*sorted(name for name in sys.modules if name.startswith("pipekernels")))
print(dist.is_backend_available("pipekernels"), dist.Backend.default_device_backend_map)
"""


SUM = """
import torch, torch.distributed as dist
dist.init_process_group("pipekernels", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(tensor.tolist(), dist.group.WORLD.name(), dist.get_backend())
dist.destroy_process_group()
"""
SUMMED = "[1.0, 1.0] pipekernels pipekernels\n"


@pytest.mark.processes
@pytest.mark.slow
@needs_torch_2_7
def test_import_torch_loads_one_small_module_and_programs_name_the_backend(
    run: Callable[..., str],
) -> None:
    """An import of the package registers the backend where the entry point is off."""
    loaded, registered, *summed = run(SHOW + SUM).splitlines(keepends=True)
    assert loaded == "pipekernels_autoload\n" and registered.startswith("True")
    _, off, *summed_by_import = run(
        SHOW + "import pipekernels.distributed" + SUM, PIPEKERNELS_AUTOLOAD="0"
    ).splitlines(keepends=True)
    assert off == registered.replace("True", "False")  # The devices' defaults are the same.
    assert summed == summed_by_import == [SUMMED]


# Imports of the package, also by torch while it is half imported itself, and calls once more.
FIRST = [
    "import pipekernels",
    "import pipekernels.distributed, pipekernels_autoload; pipekernels_autoload.register()",
]


@pytest.mark.full
@pytest.mark.processes
@needs_torch_2_7
@pytest.mark.parametrize("first", FIRST)
def test_the_package_may_be_imported_first(first: str, run: Callable[..., str]) -> None:
    assert run(first + SUM) == SUMMED


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "first, message",
    [
        ("import torch; torch.__version__ = '2.6.0'", "needs torch 2.7 or newer, this is 2.6.0"),
        ("import sys; sys.modules['pipekernels._C'] = None", "Build it with `pip install .`"),
    ],
    ids=["torch 2.6", "not built"],
)
def test_why_no_group_can_be_made_is_told(
    first: str, message: str, run: Callable[..., str]
) -> None:
    assert message in run(first + SUM).splitlines()[-1]
