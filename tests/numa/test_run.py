"""``pipekernels run`` binds ranks, sets their threads, and passes everything else to torchrun."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.programs import python

from pipekernels.numa import bound
from pipekernels.numa.run import run
from pipekernels.numa.topology import read_topology

PROGRAM = """
import json, os, sys
row = [os.environ["RANK"], os.environ["WORLD_SIZE"], sorted(os.sched_getaffinity(0)),
       os.environ["OMP_NUM_THREADS"], sys.argv[1:], sys.path[0]]
print(json.dumps(row) + "\\n", end="")  # In one write: ranks share the pipe.
"""


def start(
    *arguments: str, code: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    known = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    return python("-m", "pipekernels", "run", *arguments, code=code, env=known | environment)


@pytest.mark.processes
def test_ranks_are_bound_to_cores_of_their_own(tmp_path: Path) -> None:
    topology = read_topology()
    ranks = min(2, len(topology.cores))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = start("--nproc-per-node", str(ranks), str(tmp_path / "program.py"), "--lr", "-1")
    rows = sorted(map(json.loads, done.stdout.splitlines()))
    assert [row[0] for row in rows] == [str(rank) for rank in range(ranks)]
    cpus = [cpu for row in rows for cpu in row[2]]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))
    for _, world_size, _, threads, arguments, folder in rows:
        assert (world_size, arguments, folder) == (str(ranks), ["--lr", "-1"], str(tmp_path))
        assert int(threads) >= 1
    assert "rank 0: socket" in done.stderr


@pytest.mark.full
@pytest.mark.processes
def test_a_module_runs_with_the_threads_that_the_user_asks_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment: Any = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "7"}
    done = start("--nproc-per-node=1", "--module", "program", **environment)
    assert json.loads(done.stdout)[3] == "7"


@pytest.mark.full
@pytest.mark.processes
def test_a_program_that_fails_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(3)")
    done = start("--nproc-per-node=1", str(tmp_path / "program.py"), code=None)
    assert done.returncode != 0 and "program.py" in done.stderr


def test_a_dry_run_prints_places_only(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--nproc-per-node", "1", "--dry-run", "no_such_program.py"])
    assert capsys.readouterr().out.startswith("rank 0: socket")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "gpu"], "must be a number or 'auto', got 'gpu'"),
        (["--nproc-per-node", "0"], "cannot bind 0 ranks to"),
        (["--nproc-per-node", "100000"], "pass --nproc-per-node of 1 to [0-9]+, or use torchrun"),
        (["--numa-binding", "node"], "use torchrun with"),
    ],
)
def test_what_cannot_be_bound_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run([*arguments, "--dry-run", "program.py"])


@pytest.mark.processes
def test_what_binds_imports_neither_torch_nor_the_package() -> None:
    code = f"import runpy, sys; runpy.run_path({bound.__file__!r}); print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"
