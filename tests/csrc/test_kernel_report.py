"""The report on CUDA kernels: their resources, and the time that compilers take."""

import re
import sys
from pathlib import Path

import pytest
from support.programs import python

pytestmark = pytest.mark.native

SCRIPT = Path(__file__).parents[2] / "csrc" / "cmake" / "kernel_report.py"
LAUNCHER = SCRIPT.with_name("compile_seconds.py")
LOG = """\
/csrc/cuda/file.cu took 9.0 CPU-seconds for 1 architectures
ptxas info    : Compiling entry function '_ZN11pipekernels6kernelEv' for 'sm_90'
ptxas info    : Function properties for _ZN11pipekernels6kernelEv
    {stack} bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem
"""


@pytest.mark.parametrize(
    ("stack", "spills", "architecture", "code"),
    [(0, 0, "90", 0), (8, 0, "90", 1), (8, 8, "90", 1), (0, 0, "100", 1)],
)
def test_memory_per_thread_and_missing_architectures_are_failures(
    tmp_path: Path, stack: int, spills: int, architecture: str, code: int
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG.format(stack=stack, spills=spills))
    done = python(SCRIPT, log, "--require", architecture, code=code)
    row = done.stdout.splitlines()[1].split()
    assert row == ["kernel", "sm_90", "40", "512", str(spills), str(stack)]


def report(log: Path, *lines: str) -> tuple[int, str]:
    """The exit code and what is printed for a log with one sound kernel."""
    kernel = LOG.format(stack=0, spills=0).partition("\n")[2]
    log.write_text(kernel + "".join(f"{line}\n" for line in lines))
    done = python(SCRIPT, log, code=None)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("within", "beyond", "told"),
    [
        (
            ["135.0 3"],
            "45.1 1",
            "cuda/1.cu took 45.1 CPU-seconds per architecture to compile; the ",
        ),
        (["120.0 3"] * 5, "0.1 1", "all CUDA files took 200.1 CPU-seconds per architecture to "),
    ],
)
def test_a_file_may_take_45_seconds_per_architecture_and_all_200(
    within: list[str], beyond: str, told: str, tmp_path: Path
) -> None:
    lines = [
        "/csrc/cuda/{}.cu took {} CPU-seconds for {} architectures".format(at, *each.split())
        for at, each in enumerate([*within, beyond])
    ]
    assert report(tmp_path / "log", *lines[:-1])[0] == 0
    code, text = report(tmp_path / "log", *lines)
    assert code == 1 and told in text and "cuda/0.cu took" not in text
    assert "split the file" in text


BUSY = "import sys, time\nwhile time.process_time() < 0.5:\n    pass\nsys.exit(3)"


@pytest.mark.parametrize("architectures", [[], ["80", "90"]])
def test_the_launcher_counts_processor_time_of_compilers(
    tmp_path: Path, architectures: list[str]
) -> None:
    """Also of one that a cache starts; it adds one line, and keeps the exit code."""
    (tmp_path / "compiler.py").write_text(BUSY)
    (tmp_path / "cache.sh").write_text('"$@"\nexit $?\n')
    flags = [f"--generate-code=arch=compute_{n},code=[compute_{n},sm_{n}]" for n in architectures]
    compiler = ["sh", "cache.sh", sys.executable, "compiler.py", *flags]
    files = ["-c", "/csrc/cuda/file.cu", "-o", "file.cu.o"]
    done = python(LAUNCHER, *compiler, *files, code=3, cwd=tmp_path)
    seconds = re.fullmatch(
        rf"/csrc/cuda/file.cu took ([\d.]+) CPU-seconds for {max(1, len(flags))} architectures\n",
        done.stderr,
    )
    assert seconds is not None, done.stderr
    assert float(seconds[1]) >= 0.5
    assert report(tmp_path / "log", done.stderr)[0] == 0
