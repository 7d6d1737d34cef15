"""A budget of lines for each room, as tinygrad's sz.py has: only a decision raises one."""

from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]

# Lines of Python with comments, docstrings and blank lines: in a folder of the package without the
# folders in it, and in all of tests and bench.
BUDGETS = {
    "pipekernels": 680,
    "pipekernels/balance": 360,
    "pipekernels/comm": 1_340,
    "pipekernels/comm/bootstrap": 440,
    "pipekernels/comm/multi_host": 600,
    "pipekernels/device": 450,
    "pipekernels/distributed": 710,
    "pipekernels/huggingface": 2_700,
    "pipekernels/numa": 280,
    "pipekernels/ops": 1_670,
    "pipekernels/pipeline": 2_380,
    "pipekernels/pipeline/engine": 2_560,
    "pipekernels/pipeline/spmd": 460,
    "pipekernels/tensor_parallel": 2_280,
    "pipekernels/tensor_parallel/int8": 330,
    "pipekernels/tensor_parallel/invariant": 550,
    "pipekernels/tensor_parallel/plan": 1_270,
    "pipekernels/triton_kernels": 680,
    "tests": 23_970,
    "bench": 5_200,
}
CORE = ("pipeline", "tensor_parallel", "ops", "comm", "device", "triton_kernels")
TOTALS = {"pipekernels": 19_690, "core": 14_970}


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_every_room_keeps_its_budget() -> None:
    folders = {file.parent for file in (ROOT / "pipekernels").rglob("*.py")}
    found = {str(folder.relative_to(ROOT)): lines(folder.glob("*.py")) for folder in folders}
    found |= {top: lines((ROOT / top).rglob("*.py")) for top in ("tests", "bench")}
    assert found.keys() == BUDGETS.keys()
    assert {room: count for room, count in found.items() if count > BUDGETS[room]} == {}


def test_totals() -> None:
    found = {"pipekernels": lines((ROOT / "pipekernels").rglob("*.py"))}
    found["core"] = sum(lines((ROOT / "pipekernels" / room).rglob("*.py")) for room in CORE)
    assert {total: count for total, count in found.items() if count > TOTALS[total]} == {}
