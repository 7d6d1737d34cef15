"""The programs of docs/migration.md, as they are after the migration."""

import pkgutil
import re
import runpy
from pathlib import Path

import pytest
from support.programs import run_program

pytestmark = pytest.mark.project

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))

# What comes before each program, and what must hold afterwards.
BEFORE = """
import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
a, b, c, d = model = nn.Sequential(*(nn.Linear(4, 4).double() for _ in range(4)))
devices, input = ["cpu", "cpu"], torch.randn(10, 4, dtype=torch.float64)
expected = model(input).detach()
"""
AFTER = "torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)"
# Of some sections more of both.
MORE = {
    "torch.distributed.pipeline.sync.Pipe": (
        "saved = {number: value + 1 for number, value in enumerate(model.state_dict().values())}",
        "assert all(map(torch.equal, pipe.state_dict().values(), saved.values()))",
    ),
    "Row-parallel layers": (
        "linear = nn.Linear(4, 3).double(); expected = linear(input).detach()",
        "assert torch.equal(output, the_same)",
    ),
    "DeepSpeed's PipelineModule": (
        """SGD, loss_fn, target = torch.optim.SGD, nn.functional.mse_loss, torch.zeros_like(input)
expected, old = loss_fn(model(input), target).detach(), a.weight.detach().clone()""",
        "output = loss; assert not torch.equal(a.weight, old)",
    ),
}
OF_RANKS = {
    "SPMD pipelines": (
        "stage, input = nn.Linear(4, 4), torch.randn(8, 4)",
        "assert output.count_nonzero() == (0 if dist.get_rank() == 0 else output.numel())",
    ),
    "Megatron-LM's parallel layers": (
        "input = torch.randn(8, 4); torch.manual_seed(1)",
        """torch.manual_seed(1)
expected = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))(input)
torch.testing.assert_close(output, expected)""",
    ),
    "oneCCL": ("", "assert tensor.tolist() == [2.0] * 4"),
    "Gloo": ("", "assert tensor.tolist() == [2.0] * 4"),
}


@pytest.fixture
def path(title: str, tmp_path: Path) -> Path:
    """The Python programs of a section, for diffs the new version, with what is around them."""
    found = re.findall(r"^```(diff|python)\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)
    lines = [line for _, body in found for line in body.splitlines() if line[:1] != "-"]
    if found[0][0] == "diff":
        lines = [line[1:] if line[:1] in "+ " else line for line in lines]
    before, after = (MORE | OF_RANKS).get(title, ("", ""))
    after += "" if title in OF_RANKS else f"\n{AFTER}"
    path = tmp_path / "program.py"
    path.write_text("\n".join([BEFORE, before, *lines, after]))
    return path


@pytest.mark.parametrize("title", [title for title in SECTIONS if title not in OF_RANKS])
def test_programs_compute_what_the_plain_model_computes(path: Path) -> None:
    runpy.run_path(str(path))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("title", OF_RANKS)
def test_programs_of_ranks_run(title: str, path: Path) -> None:
    if title == "oneCCL":
        pytest.importorskip("pipekernels.distributed", exc_type=ImportError)
    run_program(path, folder=path.parent, ranks=2)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(pipekernels(?:\.\w+)+)`", PAGE))))
def test_new_names_exist(name: str) -> None:
    assert pkgutil.resolve_name(name)
