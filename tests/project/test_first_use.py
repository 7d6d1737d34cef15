"""The first use of the package imports no more than it needs: a compiler takes seconds."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.project, pytest.mark.processes]

PROGRAM = """
import json, sys, torch, torch.distributed as dist
from torch import nn

found = {}

def note(step, known):
    found[step] = sorted(set(sys.modules) - known)
    return set(sys.modules)

known = set(sys.modules)
import pipekernels
known = note("import", known)
(comm,) = pipekernels.Communicator.threads(1)
layers = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
pipekernels.tensor_parallelize(nn.Sequential(*layers), {"0": "column", "2": "row"}, comm)(
    torch.ones(2, 8)).sum().backward()
known = note("layers", known)
x = torch.ones(4, 8)
for execution in ("inline", "split"):  # The default one begins with these.
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    pipe = pipekernels.Pipe(nn.Sequential(*layers), [2, 1], devices=["cpu"] * 2, chunks=2,
                            execution=execution)
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        pipe(x).sum().backward()
        pipe.train_step(x, x, nn.functional.mse_loss, schedule=schedule)
known = note("pipe", known)
dist.init_process_group("pipekernels", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
note("backend", known)
print(json.dumps(found))
"""
STEPS = ["import", "layers", "pipe", "backend"]
COMPILERS = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "onnx")


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """By step, the modules that it imports."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("step", STEPS)
def test_few_modules_of_others_are_imported(imported: dict[str, list[str]], step: str) -> None:
    """Triton aside, which torch.utils.flop_counter imports where it is installed."""
    ours = ("pipekernels", "triton")
    others = [name for name in imported[step] if not name.startswith(ours)]
    assert len(others) <= 30, others


def test_no_compiler_and_few_modules_of_the_package_are_imported(
    imported: dict[str, list[str]],
) -> None:
    names = {name for step in imported.values() for name in step}
    assert not {name for name in names if name.startswith(COMPILERS)}
    # Few modules of the package itself: one takes about a millisecond.
    own = [name for name in imported["import"] if name.startswith("pipekernels")]
    assert len(own) <= 170, own
