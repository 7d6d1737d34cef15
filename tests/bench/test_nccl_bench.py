"""The comparison with NCCL, with Gloo in its place on CPU ranks, through the same code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import leaves_the_group

from bench import timing
from bench.nccl import CONDITIONS, collectives, layer, pipe, ranks
from bench.nccl import __main__ as nccl
from bench.nccl.collectives import Case
from bench.nccl.ranks import Ranks, Row
from bench.processes import repeated
from bench.report import pages
from pipekernels import Communicator

pytestmark = [pytest.mark.full, pytest.mark.project, leaves_the_group]

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")

# ---- whole runs ----


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, without a launcher's variables."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.processes
def test_it_starts_its_own_ranks() -> None:
    done = start("-m", "bench.nccl", "--device", "cpu", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 elements are wrong; 0 of 22 cases failed" in done.stdout
    for operation in collectives.OPERATIONS:
        assert f"**{operation}, symmetric tensors, " in done.stdout
    assert "| 1024 | 512 | sum | " in done.stdout  # All-reduce: all elements;
    assert "| 1024 | 256 | sum | " in done.stdout  # reduce-scatter: those of a rank.
    assert "| pipekernels, not fused | " in done.stdout and "| .to / it | size" in done.stdout


BROKEN = """
import sys
from bench.nccl import __main__ as nccl, collectives
from pipekernels import Communicator

collectives.OPERATIONS = ("all_reduce", "broadcast")
right = Communicator.all_reduce

def wrong(self, tensor, *args, **options):
    right(self, tensor, *args, **options)
    if self.rank == 1:
        tensor.view(-1)[3] = -1
    return tensor

Communicator.all_reduce = wrong
sys.exit(nccl.main())
"""


@pytest.mark.processes
def test_under_torchrun_an_element_that_is_wrong_on_one_rank_is_found(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start(*torchrun, str(script), "--device", "cpu", "--quick")
    assert done.returncode != 0
    # In checks before and after, of two sizes and kinds of tensors, and of the layer.
    assert "10 elements are wrong; 0 of 10 cases failed" in done.stdout, done.stdout + done.stderr
    (_, table), *_ = re.findall(r"\*\*(all_reduce, .*?)\*\*\n\n(.*?)\n\n", done.stdout, re.DOTALL)
    wrong = [line.rstrip("| ").split()[-1] for line in table.splitlines()[2:]]
    assert wrong == ["0", "2", "0", "2"]  # Of Gloo and of ours, in turn.


# ---- one rank ----


@pytest.fixture
def alone(one_thread: None) -> Iterator[Ranks]:
    """The only rank, of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (communicator,) = Communicator.threads(1)
    yield Ranks(0, 1, CPU, "Gloo", communicator, dist.new_group(backend="gloo"))
    communicator.close()
    dist.destroy_process_group()


def spoiled(function: Callable[..., torch.Tensor], argument: str | None = None) -> Any:
    """``function``, whose result, or argument of that name, gets one wrong element."""

    def call(*args: Any, **options: Any) -> torch.Tensor:
        result = function(*args, **options)
        with torch.no_grad():
            (result if argument is None else options[argument]).view(-1)[-1] = -3
        return result

    return call


def measured(work: ranks.Work, alone: Ranks) -> list[Row]:
    return ranks.measure(work, alone.turn, rounds=2)


@pytest.mark.parametrize("operation", collectives.OPERATIONS)
@pytest.mark.parametrize("tensor", collectives.TENSORS)
def test_every_collective_is_checked(
    operation: str, tensor: str, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "out" if operation == "reduce_scatter" else "in"
    case = Case(operation, tensor, place, "float32", 1 << 12)

    def wrong() -> dict[str, int]:
        rows = measured(collectives.work(case, alone), alone)
        assert {(row["size"], row["count"]) for row in rows} == {(1 << 12, 1 << 10)}
        return {row["candidate"]: row["wrong"] for row in rows}

    assert wrong() == {"pipekernels": 0, "Gloo": 0}
    monkeypatch.setattr(Communicator, operation, spoiled(getattr(Communicator, operation)))
    assert wrong() == {"pipekernels": 2, "Gloo": 0}


def test_the_layer_is_checked(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(layer.work(5, layer.TINY_SIZES, alone), alone)
    assert {row["candidate"]: row["wrong"] for row in rows} == {layer.PLAIN: 0, "Gloo": 0}
    monkeypatch.setattr(layer, "row_linear", spoiled(layer.row_linear))
    rows = measured(layer.work(5, layer.TINY_SIZES, alone), alone)
    assert {row["candidate"]: row["wrong"] for row in rows} == {layer.PLAIN: 2, "Gloo": 0}
    assert {(row["size"], row["count"]) for row in rows} == {(5 * 64 * 2, 5 * 64)}


def test_the_pipe_is_checked(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> dict[str, int]:
        rows = ranks.measure(pipe.work(2, 16, [CPU, CPU]), lambda call: repeated(call, 1), 2)
        return {row["candidate"]: row["wrong"] for row in rows}

    assert wrong() == {"pipekernels": 0, ".to": 0}
    monkeypatch.setattr(pipe, "by_hand", spoiled(pipe.by_hand))
    assert wrong() == {"pipekernels": 2, ".to": 0}


def test_sums_are_exact_in_bfloat16() -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    total = sum(collectives.contents(rank, 4000, like).double() for rank in range(8))
    assert total.max() <= 256 and len(total.unique()) > 2
    for count in (2, 8):
        _, inner = layer.SIZES
        rows = [layer.operands(rank, count, 5, (1, inner), CPU)[0] for rank in range(count)]
        ones = sum(x.double().sum(1) for x in rows)
        assert ones.min() > 0 and ones.max() <= 256


def test_the_bus_carries_what_nccl_tests_says() -> None:
    assert {operation: timing.bus(operation, 4) for operation in collectives.OPERATIONS} == {
        "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "broadcast": 1.0
    }  # fmt: skip
    work = ranks.Work({"it": lambda: None}, lambda call: 0, {"size": 8 * 10**9}, busbw=1.5)
    (row,) = ranks.measure(work, lambda call: lambda: 2.0, rounds=2)
    assert (row["algbw"], row["busbw"]) == (4.0, 6.0)


# ---- tables, files, and what is missing ----


def rows_of(alone: Ranks) -> list[Row]:
    return [row for rows in nccl.run(alone, quick=True) for row in rows]


def page_of(rows: list[Row]) -> str:
    record = {
        "name": "nccl", "date": "today", "commit": "0", "rows": rows, "conditions": CONDITIONS,
        "machine": {"cpu": "some", "cores": 2, "torch": "2"},
    }  # fmt: skip
    return pages.render([json.loads(json.dumps(record))])


def test_rows_are_shown_on_a_page(alone: Ranks) -> None:
    page = page_of(rows_of(alone))
    assert "**all_gather, ordinary tensors, out of place; 1 ranks**" in page
    assert "Geometric means of the ratios: pipekernels " in page and "Failed" not in page
    text = "<!-- bench:nccl -->\n<!-- /bench -->"
    assert pages.UNMEASURED in pages.update(text, {})


def test_without_peer_access_the_backend_is_measured_alone(alone: Ranks) -> None:
    pairs = ranks.pairs_without_access(3, lambda i, j: (i, j) != (2, 0))
    assert pairs == [(0, 2)] and ranks.pairs_without_access(3, lambda i, j: True) == []
    words = ranks.told([(0, 2), (1, 2)], "NCCL 2.27")
    assert words.startswith("No peer access between GPUs 0 and 2, 1 and 2: ")
    assert alone.communicator is not None
    alone.communicator.close()
    alone.communicator, alone.left_out = None, words
    rows = rows_of(alone)
    measured = {(row["part"].startswith("Pipe"), row["candidate"]) for row in rows if "part" in row}
    assert measured == {(False, "Gloo"), (True, "pipekernels"), (True, ".to")}  # Pipes work.
    assert not any(row.get("wrong") or "error" in row for row in rows)
    assert words in page_of(rows)


def test_a_case_that_fails_is_a_row_and_the_others_are_measured(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Communicator.reduce_scatter

    def fail_once(comm: Communicator, *args: Any, **options: Any) -> torch.Tensor:
        monkeypatch.setattr(Communicator, "reduce_scatter", right)
        comm.close()  # As an error on the device does.
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(Communicator, "reduce_scatter", fail_once)
    rows = rows_of(alone)
    (failed,) = (row for row in rows if "error" in row)
    assert failed["part"].startswith("reduce_scatter") and len(rows) == 22 * 2 - 1
    named = "ordinary tensors, out of place; 1 ranks, 1024 bytes, bfloat16: RuntimeError: no kernel"
    assert named in page_of(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_it_says_what_there_is_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench.nccl"])
    with pytest.raises(SystemExit, match="2 to 8 GPUs, and torch .* sees 0.*--device cpu --quick"):
        nccl.main()
    monkeypatch.setattr(sys, "argv", ["bench.nccl", "--device", "cpu"])
    with pytest.raises(SystemExit):
        nccl.main()
    assert "add --quick to see it run" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit, match="no GPU for rank 3: start at most 0 ranks"):
        ranks.join("cuda")
