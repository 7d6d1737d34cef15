"""Processes of :mod:`support.programs` are what torchrun's are, and none outlives a failure."""

import json
import re
import time
from pathlib import Path

import pytest
from support.programs import python, run_program

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SHOW = """
import json, os, sys
import torch, torch.distributed as dist
import pipekernels.distributed

names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]
names += ["OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"]
state = {name: os.environ[name] for name in names}
state |= {"arguments": sys.argv, "name": __name__, "first": sys.path[0], "folder": os.getcwd()}
state |= {"threads": torch.get_num_threads(), "elastic": dist.is_torchelastic_launched()}
state["backends"] = sorted(dist.Backend.backend_list)
dist.init_process_group("pipekernels")
x = torch.ones(1)
dist.all_reduce(x)
state["sum"] = x.item()
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
    json.dump(state, file)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_ranks_have_what_torchrun_gives_them(tmp_path: Path) -> None:
    pytest.importorskip("pipekernels.distributed", exc_type=ImportError)
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(SHOW)
    output.mkdir()

    def states() -> list[dict[str, object]]:
        return [json.loads((output / str(rank)).read_text()) for rank in range(2)]

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    python(*torchrun, program, output, cwd=tmp_path)
    expected = states()
    run_program(program, str(output), folder=tmp_path, ranks=2)
    assert states() == expected


FAIL = """
import os, pathlib, subprocess, time

child = pathlib.Path("child")
if os.environ["RANK"] == "0":
    process = subprocess.Popen(["sleep", "1000"])
    child.write_text(str(process.pid))
    process.wait()
while not child.exists() or not child.read_text():
    time.sleep(0.01)
raise ValueError("on rank 1")
"""


@pytest.mark.timeout(90)  # Less than the limit of the program.
def test_a_failure_ends_all_ranks_and_what_they_have_started(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAIL)
    with pytest.raises(AssertionError, match="process 0 ended with -9") as caught:
        run_program(program, folder=tmp_path, ranks=2)
    assert re.search("process 1 ended with 1:.*ValueError: on rank 1", str(caught.value), re.DOTALL)
    status = Path("/proc", (tmp_path / "child").read_text(), "status")
    while status.exists() and "State:\tZ" not in status.read_text():
        time.sleep(0.01)
