"""A budget of lines for each room, as tinygrad's sz.py has: only a decision raises one."""

from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]

# Lines of Python with comments, docstrings and blank lines: in a folder of the package without the
# folders in it, and in all of tests and bench.
BUDGETS = {
    "pipekernels": 1_090,
    "pipekernels/balance": 450,
    "pipekernels/binding": 320,
    "pipekernels/comm": 1_570,
    "pipekernels/comm/hosts": 570,
    "pipekernels/comm/join": 450,
    "pipekernels/comm/process_group": 740,
    "pipekernels/device": 500,
    "pipekernels/huggingface": 2_190,
    "pipekernels/kernels": 660,
    "pipekernels/local_ops": 1_420,
    "pipekernels/ops": 50,
    "pipekernels/pipeline": 600,
    "pipekernels/pipeline/engine": 1_850,
    "pipekernels/pipeline/placement": 510,
    "pipekernels/pipeline/schedule": 530,
    "pipekernels/pipeline/spmd": 610,
    "pipekernels/pipeline/stage": 1_900,
    "pipekernels/pipeline/values": 660,
    "pipekernels/tensor_parallel": 2_320,
    "pipekernels/tensor_parallel/arithmetic": 660,
    "pipekernels/tensor_parallel/int8": 350,
    "pipekernels/tensor_parallel/plan": 1_410,
    "tests": 25_500,
    "bench": 5_250,
}
CORE = ("pipeline", "tensor_parallel", "comm", "local_ops", "device", "kernels")
TOTALS = {"pipekernels": 21_300, "core": 17_220}


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
