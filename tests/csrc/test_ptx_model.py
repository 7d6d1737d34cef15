"""The checker of csrc/model/ptx, and that its programs are made of the instructions of the code."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "csrc" / "model"
PROTOCOLS = {path.stem: path.read_text() for path in (MODEL / "ptx" / "protocols").iterdir()}


@pytest.fixture(scope="module")
def check_ptx() -> Iterator[Any]:
    sys.path.insert(0, str(MODEL))
    yield importlib.import_module("check_ptx")
    sys.path.remove(str(MODEL))


def test_classic_shapes_have_their_verdicts(check_ptx: Any) -> None:
    tests = check_ptx.classic()
    assert len(tests) >= 36
    assert [test.name for test in tests if not check_ptx.passes(test)] == []


@pytest.mark.parametrize("name", ["signal", "preserved", "failure", "pushed"])
def test_protocol_holds_and_each_break_is_found(check_ptx: Any, name: str) -> None:
    whole, *broken = check_ptx.programs(name)
    assert check_ptx.search(whole[1]).error == ""
    assert len(broken) >= 5
    for what, program, _ in broken:
        assert check_ptx.search(program).error in ("wrong value", "data race"), what


def opcodes(text: str) -> set[str]:
    """Strong accesses and fences, without address space and type."""
    found = re.findall(r"\b((?:ld|st|atom|fence)\.(?:relaxed|acquire|release|acq_rel)[\w.]*)", text)
    return {re.sub(r"\.global|\.[bsu]\d+", "", opcode) for opcode in found}


def test_programs_have_the_instructions_of_the_code() -> None:
    used = {opcode for text in PROTOCOLS.values() for opcode in opcodes(text)}
    team = opcodes((ROOT / "csrc/cuda/collectives/device_team.cuh").read_text())
    assert {"ld.acquire.sys", "st.release.sys", "fence.acq_rel.sys"} <= team <= used
    gemm = (ROOT / "pipekernels/triton_kernels/gemm.py").read_text()
    atomics = re.findall(r'tl\.atomic_add\(.*sem="(\w+)", scope="(\w+)"\)', gemm)
    assert len(atomics) == 1
    assert {f"atom.{order}.{scope}.add" for order, scope in atomics} <= used
