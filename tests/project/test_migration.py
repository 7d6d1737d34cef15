"""The programs of docs/migration.md, as they are after the migration."""

import pkgutil
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import run_program
from torch import nn

from pipekernels import Pipe

pytestmark = pytest.mark.project

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def programs(title: str) -> list[str]:
    """The Python programs of a section; for diffs, the new version."""
    found = []
    blocks = re.findall(r"^```(diff|python)\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)
    for language, body in blocks:
        lines = body.splitlines()
        if language == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        found.append("\n".join(lines))
    return found


def run(program: str, names: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "program.py"
    path.write_text(program)
    return runpy.run_path(str(path), init_globals=names)


def test_every_section_has_a_program() -> None:
    counts = {title: len(programs(title)) for title in SECTIONS}
    assert counts.pop("torch.distributed.pipeline.sync.Pipe") == 2
    assert len(counts) == 11 and set(counts.values()) == {1}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(pipekernels(?:\.\w+)+)`", PAGE))))
def test_new_names_exist(name: str) -> None:
    assert pkgutil.resolve_name(name)


# Programs of ranks, each with what it is given before and what must hold afterwards.
OF_RANKS = {
    "SPMD pipelines": (
        "stage = nn.Linear(4, 4)",
        "assert output.count_nonzero() == (0 if dist.get_rank() == 0 else output.numel())",
    ),
    "Megatron-LM's parallel layers": (
        "torch.manual_seed(1)",
        """torch.manual_seed(1)
expected = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))(input)
torch.testing.assert_close(output, expected)""",
    ),
    "oneCCL": ("", "assert tensor.tolist() == [2.0] * 4"),
    "Gloo": ("", "assert tensor.tolist() == [2.0] * 4"),
}
OTHERS = ("Row-parallel layers", "DeepSpeed's PipelineModule")
OF_A_PIPE = [title for title in SECTIONS if title not in (*OF_RANKS, *OTHERS)]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("title", OF_RANKS)
def test_programs_of_ranks_run(title: str, tmp_path: Path) -> None:
    if title == "oneCCL":
        pytest.importorskip("pipekernels.distributed", exc_type=ImportError)
    before, after = OF_RANKS[title]
    begin = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
    begin += "torch.manual_seed(0)\ninput = torch.randn(8, 4)"
    path = tmp_path / "program.py"
    path.write_text("\n".join([begin, before, *programs(title), after]))
    run_program(path, folder=tmp_path, ranks=2)


def given_before() -> tuple[nn.Sequential, dict[str, Any]]:
    """A model, and the names that a program of a pipe uses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4).double() for _ in range(4)))
    names = dict(zip("abcd", model, strict=True)) | {"nn": nn, "devices": ["cpu", "cpu"]}
    return model, names | {"input": torch.randn(10, 4, dtype=torch.float64)}


@pytest.mark.parametrize("title", OF_A_PIPE)
def test_programs_compute_what_the_plain_model_computes(title: str, tmp_path: Path) -> None:
    model, names = given_before()
    expected = model(names["input"])
    output = run(programs(title)[0], names | {"model": model}, tmp_path)["output"]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)


def test_a_training_step_has_the_loss_of_the_plain_model(tmp_path: Path) -> None:
    model, names = given_before()
    names |= {"SGD": torch.optim.SGD, "loss_fn": nn.functional.mse_loss}
    names["target"] = torch.zeros(10, 4).double()
    expected = nn.functional.mse_loss(model(names["input"]), names["target"])
    before = model[0].weight.detach().clone()
    loss = run(programs("DeepSpeed's PipelineModule")[0], names, tmp_path)["loss"]
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    assert not torch.equal(model[0].weight, before)


def test_a_row_parallel_layer_computes_what_the_plain_one_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(5, 3).double()
    names = {"linear": linear, "input": torch.randn(4, 5, dtype=torch.float64)}
    done = run(programs("Row-parallel layers")[0], names, tmp_path)
    assert torch.equal(done["output"], done["the_same"])
    torch.testing.assert_close(done["output"], linear(names["input"]), rtol=0, atol=1e-12)


def test_state_dicts_whose_layers_are_numbered_by_stage(tmp_path: Path) -> None:
    pipe = Pipe(nn.Sequential(*[nn.Linear(1, 1) for _ in range(3)]), [1, 2], devices=["cpu"] * 2)
    saved = {
        f"partitions.{stage}.{layer}.{name}": torch.full(shape, float(value))
        for value, (stage, layer) in enumerate([(0, 0), (1, 0), (1, 1)])
        for name, shape in [("weight", (1, 1)), ("bias", (1,))]
    }
    program = programs("torch.distributed.pipeline.sync.Pipe")[1]
    run(program, {"pipe": pipe, "saved": saved}, tmp_path)
    assert [(layer.weight.item(), layer.bias.item()) for layer in pipe] == [(0, 0), (1, 1), (2, 2)]
