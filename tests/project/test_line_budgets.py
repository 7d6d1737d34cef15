"""A budget of lines for each room, as tinygrad's sz.py has: only a decision raises one."""

from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]

# Lines of Python with comments, docstrings and blank lines: in a folder of the package without the
# folders in it, and in all of tests and bench.
BUDGETS = {
    "pipekernels": 925,
    "pipekernels/balance": 360,
    "pipekernels/binding": 280,
    "pipekernels/comm": 1_560,
    "pipekernels/comm/hosts": 600,
    "pipekernels/comm/join": 440,
    "pipekernels/comm/process_group": 500,
    "pipekernels/device": 450,
    "pipekernels/huggingface": 2_710,
    "pipekernels/kernels": 650,
    "pipekernels/local_ops": 1_330,
    "pipekernels/ops": 30,
    "pipekernels/pipeline": 520,
    "pipekernels/pipeline/engine": 1_500,
    "pipekernels/pipeline/placement": 240,
    "pipekernels/pipeline/schedule": 410,
    "pipekernels/pipeline/spmd": 460,
    "pipekernels/pipeline/stage": 1_660,
    "pipekernels/pipeline/values": 640,
    "pipekernels/tensor_parallel": 2_440,
    "pipekernels/tensor_parallel/arithmetic": 620,
    "pipekernels/tensor_parallel/int8": 330,
    "pipekernels/tensor_parallel/plan": 1_290,
    "tests": 25_850,
    "bench": 5_480,
}
CORE = ("pipeline", "tensor_parallel", "ops", "comm", "device", "triton_kernels")
TOTALS = {"pipekernels": 19_860, "core": 15_575}


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
