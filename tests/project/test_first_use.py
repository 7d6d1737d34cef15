"""The first use of the package imports no more than it needs: a compiler takes seconds."""

import json

import pytest
from support.programs import python

pytestmark = [pytest.mark.project, pytest.mark.processes]

PROGRAM = """
import json, sys, torch, torch.distributed as dist
from torch import nn

found = {}

def note(step, known):
    found[step] = sorted(set(sys.modules) - known)
    return set(sys.modules)

known = set(sys.modules)
sys.modules["triton"] = None
import pipekernels
known = note("import", known)
assert not torch.cuda.is_initialized()
(comm,) = pipekernels.Communicator.threads(1)
layers = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
pipekernels.tensor_parallelize(nn.Sequential(*layers), {"0": "column", "2": "row"}, comm)(
    torch.ones(2, 8)).sum().backward()
known = note("layers", known)
x = torch.ones(4, 8)
layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
pipe = pipekernels.Pipe(nn.Sequential(*layers), [2, 1], devices=["cpu"] * 2, chunks=2)
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
COMPILERS = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "onnx")


def test_few_modules_and_no_compiler_are_imported() -> None:
    """Nor is Triton needed, and no GPU is touched. One module of the package itself takes about a
    millisecond."""
    printed = python("-c", PROGRAM).stdout
    found: dict[str, list[str]] = json.loads(printed.splitlines()[-1])
    for step, names in found.items():
        others = [name for name in names if not name.startswith("pipekernels")]
        assert len(others) <= 30, (step, others)
        assert not [name for name in names if name.startswith(COMPILERS)], step
    own = [name for name in found["import"] if name.startswith("pipekernels")]
    assert len(own) <= 170, own
