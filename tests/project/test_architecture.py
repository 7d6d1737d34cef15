"""The rules that keep the parts apart: who may import whom, and what csrc must not know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipekernels"
CSRC = ROOT / "csrc"

# pipeline, tensor_parallel -> comm -> ops -> {_backend, kernels}
MAY_IMPORT = {
    "pipeline": {"pipeline", "comm", "ops", "_backend", "_version"},
    "tensor_parallel": {"tensor_parallel", "comm", "ops", "_backend", "_version"},
    "distributed": {"comm", "_version"},
    "comm": {"comm", "ops", "_backend", "_cache", "_version"},
    "ops": {"ops", "kernels", "_backend", "_version"},
    "kernels": {"kernels", "_cache", "_version"},
    "_backend": {"_C", "_version"},
    "_cache": set(),
    "reference": set(),
    "balance": {"balance", "ops", "pipeline"},
    "batchnorm": {"pipeline"},
    "skip": {"pipeline"},
}


def imports(path: Path) -> set[str]:
    """Absolute names of every module that ``path`` imports, or part of one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction_of_dependence(path: Path) -> None:
    part = part_of(path)
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("pipekernels.")}
    if part in MAY_IMPORT:
        assert ours <= MAY_IMPORT[part]
    used = {name.split(".")[0] for name in imports(path)}
    assert "triton" not in used or part == "kernels"
    assert not any("._C" in name for name in imports(path)) or part == "_backend"


def test_the_extension_is_loaded_in_one_place_only() -> None:
    assert [p.name for p in MODULES if "pipekernels._C" in p.read_text()] == ["_backend.py"]


def sources() -> list[Path]:
    return [p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]


def test_csrc_knows_no_torch_and_python_in_the_bindings_only() -> None:
    assert sources()
    for path in sources():
        included = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        for line in included:
            assert not any(name in line for name in ("torch/", "ATen/", "c10/")), path
            if "pybind11" in line or "Python.h" in line:
                assert path.parent == CSRC and path.stem.startswith("bindings")


def test_every_cuda_file_has_a_cpu_file_of_its_stem() -> None:
    cpu = {path.stem for path in (CSRC / "cpu").glob("*.cpp")}
    cuda = {path.stem for path in (CSRC / "cuda").glob("*.cu")}
    assert cuda <= cpu


def test_import_needs_no_triton_and_touches_no_gpu() -> None:
    script = (
        "import sys, torch; sys.modules['triton'] = None; import pipekernels; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
