"""Rules of the architecture: allowed imports, sizes of rooms, and what csrc must not include.

docs/architecture.md lists the rooms.
"""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipekernels"
CSRC = ROOT / "csrc"

# Every room, and the rooms that it may import; what those may import, it may import too.
MAY_IMPORT = {
    "_version": set(),
    "_torch_private": set(),
    "_arguments": set(),
    "_backend": {"_torch_private", "_version"},
    "triton_kernels": {"_torch_private"},
    "device": {"_backend"},
    "comm.errors": set(),
    "comm.codes": {"_backend"},
    "comm.messages": set(),
    "comm.tensors": {"comm.codes", "_arguments", "_backend"},
    "comm.shared_memory": {"comm.tensors"},
    "comm.process_group": {"comm.codes", "_torch_private"},
    "comm.cuda": {"comm.shared_memory", "comm.process_group", "comm.messages", "device"},
    "comm.collectives": {"comm.cuda"},
    "comm.bootstrap": {"comm.errors", "comm.messages", "_arguments", "_backend"},
    "comm.communicator": {"comm.collectives", "comm.bootstrap"},
    "comm": {"comm.communicator"},
    "distributed": {"comm"},
    "ops": {"comm", "triton_kernels"},
    "tensor_parallel.data_parallel": {"comm"},
    "tensor_parallel.functional": {"ops"},
    "tensor_parallel.invariant": {"tensor_parallel.data_parallel", "tensor_parallel.functional"},
    "tensor_parallel.full_layer": {"_torch_private"},
    "tensor_parallel.partial_gradients": {
        *("tensor_parallel.invariant", "tensor_parallel.full_layer"),
    },
    "tensor_parallel.integer_matrix": {"ops"},
    "tensor_parallel.sharded": {
        *("tensor_parallel.invariant", "tensor_parallel.full_layer"),
        "tensor_parallel.integer_matrix",
    },
    "tensor_parallel.linear": {"tensor_parallel.sharded"},
    "tensor_parallel.embedding": {"tensor_parallel.sharded"},
    "tensor_parallel.experts": {"tensor_parallel.sharded"},
    "tensor_parallel.integers": {"tensor_parallel.sharded"},
    "tensor_parallel.attention": {"tensor_parallel.linear"},
    "tensor_parallel.cross_entropy": {"tensor_parallel.invariant"},
    "tensor_parallel.clip": {"tensor_parallel.sharded"},
    "tensor_parallel.state": {"tensor_parallel.sharded"},
    "tensor_parallel.plan": {
        *("tensor_parallel.attention", "tensor_parallel.embedding"),
        *("tensor_parallel.experts", "tensor_parallel.partial_gradients"),
    },
    "tensor_parallel": {
        *("tensor_parallel.clip", "tensor_parallel.cross_entropy"),
        "tensor_parallel.integers",
        *("tensor_parallel.plan", "tensor_parallel.state"),
    },
    "pipeline.nested": {"ops"},
    "pipeline.microbatch": {"pipeline.nested"},
    "pipeline.schedule": {"_arguments"},
    "pipeline.timeline": {"pipeline.schedule", "device"},
    "pipeline.skip": {"_arguments"},
    "pipeline.partition": {"comm", "pipeline.skip"},
    "pipeline.context": {"ops"},
    "pipeline.batchnorm": {"pipeline.context"},
    "pipeline.engine": {
        *("pipeline.batchnorm", "pipeline.microbatch"),
        *("pipeline.partition", "pipeline.timeline"),
    },
    "pipeline.spmd": {"pipeline.engine"},
    "pipeline.device_map": {"pipeline.engine"},
    "balance.blockpartition": {"_arguments"},
    "pipeline.pipe": {"balance.blockpartition", "pipeline.engine"},
    "pipeline.pipeline_parallel": {"pipeline.pipe"},
    "pipeline": {"pipeline.device_map", "pipeline.pipeline_parallel", "pipeline.spmd"},
    "huggingface": {"tensor_parallel", "pipeline"},
    "balance": {"balance.blockpartition", "pipeline.engine"},
    "batchnorm": {"pipeline"},
    "skip": {"pipeline"},
    "": {"balance", "batchnorm", "huggingface", "skip"},
    "numa": set(),
    "cli": {"", "numa"},
    "__main__": {"cli"},
}
DIVIDED = {"comm", "pipeline", "tensor_parallel"}  # Packages that consist of several rooms.


def files_of(package: Path) -> dict[str, Path]:
    """The files of ``package`` by dotted name below it; empty for the package itself."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = files_of(PACKAGE)


def imports(path: Path) -> set[str]:
    """Absolute names of all imports of ``path``, also in functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported(path: Path, package: Path = PACKAGE) -> set[str]:
    """The modules of ``package`` that ``path`` imports."""
    found, files = set(), FILES if package == PACKAGE else files_of(package)
    for name in imports(path):
        top, _, below = name.partition(".")
        if top == package.name and below != "_C":
            found.add(below if below in files else below.rpartition(".")[0])
    return found


def room_of(module: str) -> str:
    if module in MAY_IMPORT:  # A file may be a room, such as balance.blockpartition.
        return module
    first, _, rest = module.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in DIVIDED and rest else first


def importable(room: str) -> set[str]:
    """``room`` and all rooms that it may import, also indirectly."""
    found: set[str] = set()
    stack = [room]
    while stack:
        if (one := stack.pop()) not in found:
            found.add(one)
            stack.extend(MAY_IMPORT[one])
    return found


def test_rooms_import_each_other_in_no_circle() -> None:
    for room, others in MAY_IMPORT.items():
        assert not any(room in importable(other) for other in others), room


def test_imports_are_allowed() -> None:
    for module, path in FILES.items():
        rooms = {room_of(name) for name in imported(path)}
        assert rooms <= importable(room_of(module)), module
        others = {name.split(".")[0] for name in imports(path)}
        assert "triton" not in others or room_of(module) == "triton_kernels", module
        assert module == "_backend" or not any("._C" in name for name in imports(path)), module
        assert ("pipekernels._C" in path.read_text()) == (module == "_backend"), module


@pytest.mark.parametrize("package", [PACKAGE, ROOT / "bench"], ids=lambda path: path.name)
def test_modules_import_each_other_in_no_circle(package: Path) -> None:
    todo = {module: imported(path, package) for module, path in files_of(package).items()}
    while ready := {module for module, others in todo.items() if not others & todo.keys()}:
        for module in ready:
            del todo[module]
    assert not todo, f"circles among {sorted(todo)}"


def test_no_data_is_executed_as_code() -> None:
    """Stores, ports and files may hold data that an attacker wrote."""
    for path in FILES.values():
        modules = {name.split(".")[0] for name in imports(path)}
        assert not modules & {"pickle", "marshal", "shelve"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):  # Such as dist.all_gather_object().
                text = ast.unparse(node)
                assert not text.endswith(("_object", "_object_list")), f"{path}: {text}"
                assert text != "torch.load", path
            assert not (isinstance(node, ast.Name) and node.id in ("eval", "exec")), path


def private_names_of_torch(tree: ast.Module) -> set[str]:
    """Private modules and names that are imported from torch, and private attributes of these."""
    found, torchs = set(), set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for alias in node.names:
            whole = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            if whole.split(".")[0] == "torch":
                torchs.add((alias.asname or alias.name).split(".")[0])
                found.add(whole)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in torchs:
            found.add(ast.unparse(node))
    # The _fields of a named tuple are public.
    return {name for name in found if re.search(r"(^|\.)_(?!_|fields\b)", name)}


def test_private_names_of_torch_are_in_one_module_only() -> None:
    code = "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()"
    assert private_names_of_torch(ast.parse(code))
    for module, path in FILES.items():
        found = private_names_of_torch(ast.parse(path.read_text()))
        assert bool(found) == (module == "_torch_private"), (module, found)


def test_the_architecture_page_lists_all_rooms() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `pipekernels/(\S*?)/?` \|", page, re.MULTILINE)
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")}
    files = {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    assert sorted(listed) == sorted((folders - {"."}) | files)


@pytest.mark.parametrize("top", ["pipekernels", "tests", "bench", "demo", "examples"])
def test_rooms_and_files_are_small(top: str) -> None:
    longest = 480 if top == "tests" else 450
    for folder in [ROOT / top, *(ROOT / top).rglob("*/")]:
        files = list(folder.glob("*.py")) if folder.name != "results" else []
        others = [file for file in files if file.name != "__init__.py"]
        assert len(others) <= 15, f"{folder} has {len(others)} files beside its __init__.py"
        for file in files:
            assert len(file.read_text().splitlines()) <= longest, file


def sources() -> list[Path]:
    return [p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]


def test_csrc_includes_no_torch_and_python_in_the_bindings_only() -> None:
    assert sources()
    for folder in {path.parent for path in sources()}:
        assert len([path for path in sources() if path.parent == folder]) <= 17, folder
    for path in sources():
        lines = path.read_text().splitlines()
        assert len(lines) <= 500, path
        for line in [line for line in lines if line.startswith("#include")]:
            assert not any(name in line for name in ("torch/", "ATen/", "c10/")), path
            if "pybind11" in line or "Python.h" in line:
                assert path.parent == CSRC / "bindings"


# Ranks on CPUs have no device to set up, and no links that could be broken or slow.
OF_DEVICES = {"collectives/set_up", "host/nvlink", "shared_memory/peer_check"}


def test_every_cuda_file_has_a_cpu_file_of_its_stem() -> None:
    cpu = {p.relative_to(CSRC / "cpu").with_suffix("") for p in (CSRC / "cpu").rglob("*.cpp")}
    cuda = {p.relative_to(CSRC / "cuda").with_suffix("") for p in (CSRC / "cuda").rglob("*.cu")}
    assert {path.as_posix() for path in cuda - cpu} == OF_DEVICES
