"""The files in examples/ that start programs on several hosts: Slurm's and Kubernetes'."""

import os
import re
import socket
import sys
from pathlib import Path

import pytest
from support.programs import run

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "slurm.sh"
KUBERNETES = ROOT / "examples" / "kubernetes.yaml"
pytestmark = [pytest.mark.processes, pytest.mark.slow]

# Starts the task of two hosts here, which do not share memory.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift 2; done
PIPEKERNELS_HOST_ID=a "$@" & first=$!
PIPEKERNELS_HOST_ID=b "$@" & second=$!
wait $first && wait $second
"""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.full
def test_the_slurm_script_on_two_pretended_hosts(tmp_path: Path) -> None:
    script(tmp_path / "srun", SRUN)
    script(tmp_path / "scontrol", "#!/usr/bin/env bash\nprintf 'localhost\\nlocalhost\\n'\n")
    script(
        tmp_path / "torchrun",
        f'#!/usr/bin/env bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n',
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        job = free.getsockname()[1] % 20000  # Decides on the port.
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": str(job), "RANKS_PER_HOST": "2",
    }  # fmt: skip
    done = run("bash", SLURM, "--steps", "3", cwd=ROOT, env=os.environ | environment)
    assert "4 ranks on 2 hosts, 2 on each" in done.stdout
    assert len(re.findall(r"\d\.\d{6}", done.stdout)) == 6


def test_the_pods_start_a_program_that_there_is() -> None:
    (program,) = re.findall(r"\S+\.py", KUBERNETES.read_text())
    assert (ROOT / program).is_file()
