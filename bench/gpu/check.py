"""``make gpu-check``: builds for the local GPU, then tests, measures and checks, in 8 minutes.

After the build all tests marked ``cuda`` are run, the most telling first. Benchmarks then have the
machine for themselves, and compute-sanitizer, the slowest, comes last: what it finds is shown, and
fails nothing.

Uses the Python that starts it, which needs torch with CUDA, pytest, pytest-timeout, hypothesis,
pybind11, CMake and Ninja, but no network. With pytest-xdist, a test that hangs or crashes affects
no other. Every step is a process with a time limit. If a step fails, the others are still run; if
it is the build, on an extension built before, as with ``--built``. With ``--dry-run`` a machine
without a GPU runs what it can of each step, on the CPU: whether all of them start and report. The
summary at the end and the exit status report failures; what there was no time for is listed apart.
Results go to ``$OUT``, or else ``bench/results/<gpu>``, in at most eight files:

* ``gpu_check.log``: all output, with the summary at the end.
* ``gpu.NAME.json``: the results of a benchmark, up to where it may have been stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-u"]
# Seconds of each step, 8 minutes in all. Time that a step does not use goes to the later ones.
SHARES = {
    "environment": 15,
    "build": 110,
    "kernels": 5,
    "extension": 5,
    "tests": 150,
    "gpu.micro_batch": 20,
    "gpu.pipe": 25,
    "gpu.all_reduce": 35,
    "gpu.p2p_copy": 15,
    "gpu.soak": 15,
    "gpu.sharded_gemm": 40,
    "sanitizers": 45,
}
DEADLINES = dict(zip(SHARES, itertools.accumulate(SHARES.values()), strict=True))
ENVIRONMENT = (
    "nvidia-smi; nvcc --version; compute-sanitizer --version; "
    "env | grep -E '^(CUDA|NCCL|PIPEKERNELS|PYTORCH|TORCH|TRITON|OMP)'; "
    f"{sys.executable} -m torch.utils.collect_env"
)
GPU = """
import json, torch
from bench import records
assert torch.cuda.is_available(), f"torch {torch.__version__} sees no CUDA GPU"
gpu = torch.cuda.get_device_properties(0)
print(json.dumps([str(records.results_folder()), f"{gpu.major}{gpu.minor}"]))
"""
IMPORT = """
from pipekernels import _backend
built = _backend.build_info()
assert built["cuda"] or {dry}, "the extension was built without CUDA"
print("note: for", built.get("cuda_architectures"), "by CUDA", built.get("cuda_version"))
"""
SKIPPED = 77  # exit status of a command that cannot run here; its last line says why
PATIENCE = 5.0  # seconds to print stacks after a timeout, and to die
ENDING = 10  # seconds of a benchmark's share that are reserved for its end
# Files whose tests are run first: kernels that were least tested without a GPU.
FIRST = [
    "tests/comm/test_cuda_collectives.py",
    "tests/comm/test_all_reduce.py",
    "tests/local_ops/test_sharded_gemm.py",
    "tests/local_ops/test_p2p_copy.py",
    "tests/tensor_parallel/test_linear.py",
]
PYTEST = [*PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rfE", "--tb=short"]
CORES = len(os.sched_getaffinity(0))
TEST_SECONDS = 90  # for one test; a few start processes that each load torch and CUDA
TOGETHER = 8  # tests at the same time
# Ranks that are processes take turns on the GPU, with each other and with whatever else uses it.
MARKED = [
    ("tests", "cuda and not processes", TOGETHER),
    ("tests of ranks", "cuda and processes", 1),
]
# What pytest -v prints of a test, with pytest-xdist and without.
TESTED = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] |tests\S+::.* )(PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE
)
# Name, tool, parts of bench/gpu/sanitized.py, environment. Without torch's caching each tensor is a
# separate allocation, so that memcheck sees every access out of bounds. Not for collectives: ranks
# must not allocate device memory while others wait.
SANITIZERS: list[tuple[str, str, list[str], dict[str, str]]] = [
    ("memcheck", "memcheck", ["copies", "gemm"], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    ("memcheck, collectives", "memcheck", ["collectives"], {}),
    ("racecheck", "racecheck", ["copies", "collectives"], {}),
    ("racecheck, GEMM", "racecheck", ["gemm"], {}),
]
OPTIONS = {
    # Accesses only: API calls that query features may fail.
    "memcheck": ["--report-api-errors", "no"],
    # Waits for flags in memory are hazards of the level "warning".
    "racecheck": ["--racecheck-detect-level", "error"],
}


class Outcome(NamedTuple):
    """The outcome of a step.

    Attributes:
        name: the step's.
        status: ``'passed'``, ``'failed'``, ``'timed out'``, ``'not run'`` for lack of time, or
            ``'skipped'`` as it cannot run here.
        seconds: its duration.
        note: one line: the reason or result, or what the step printed in lines ``note: ...``.
        output: all that it printed.
    """

    name: str
    status: str
    seconds: float = 0.0
    note: str = ""
    output: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing went wrong as far as it ran."""
        return self.status in ("passed", "skipped", "not run")

    def __str__(self) -> str:
        return f"{self.name:<26} {self.status:<10} {self.seconds:4.0f} s  {self.note}"


def run_step(
    name: str, command: Sequence[str], environment: Mapping[str, str], deadline: float
) -> Outcome:
    """Run one command until ``deadline`` (of ``time.monotonic``) at most.

    It leads a session, to be killed with all its child processes. On a timeout it is first sent
    SIGABRT: Python's fault handler then prints the stacks of all threads.
    """
    begin = time.monotonic()
    if deadline <= begin:
        return Outcome(name, "not run", note="no time was left for it")
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT,
            env=os.environ | defaults | dict(environment), start_new_session=True,
        )  # fmt: skip
        status = _ended(process, deadline - begin)
        if status is None:
            _signal(process, signal.SIGABRT)
            _ended(process, PATIENCE)
        _signal(process, signal.SIGKILL)  # What is left of its session.
        _ended(process, PATIENCE)  # A driver may hold it; later steps have their own limits.
        file.seek(0)
        output = file.read()
    seconds = time.monotonic() - begin
    lines = output.strip().splitlines() or [""]
    if status in (None, SKIPPED):
        found = "timed out" if status is None else "skipped"
        return Outcome(name, found, seconds, lines[-1], output)
    if status:
        return Outcome(name, "failed", seconds, f"exit status {status}: {lines[-1]}", output)
    notes = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    return Outcome(name, "passed", seconds, "; ".join(notes), output)


def _ended(process: subprocess.Popen[str], seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Check:
    """One run of all steps.

    Args:
        folder: where results go.
        architecture: of the GPU, such as ``'90'``.
        dry: whether there is no GPU.
    """

    def __init__(self, folder: Path, architecture: str, *, dry: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.outcomes: list[Outcome] = []
        self.sanitized: list[Outcome] = []
        self._folder, self._architecture, self._dry = folder, architecture, dry
        self._log = (folder / "gpu_check.log").open("w")
        self._lock = threading.Lock()
        self._begin = time.monotonic()

    def run(self, *, built: bool = False) -> bool:
        """Run all steps, the build only if not ``built`` before; returns whether none failed."""
        self.step("environment", ["sh", "-c", ENVIRONMENT])
        if not built:
            self.build()
        if self.step("extension", [*PYTHON, "-c", IMPORT.format(dry=self._dry)]).good:
            self.tests()
            for name in SHARES:
                if name.startswith("gpu."):
                    seconds = max(1, int(self._deadline(name) - time.monotonic()) - ENDING)
                    command = [*PYTHON, "-m", "bench", name]
                    dry = ["--quick", "--device", "cpu"] if self._dry else []
                    self.step(name, [*command, "--seconds", str(seconds), *dry])
            self.sanitizers()
        return self.finish()

    def step(self, name: str, command: list[str], environment: Mapping[str, str] = {}) -> Outcome:
        """Run one command until the end of its share."""
        outcome = run_step(name, command, environment, self._deadline(name))
        return self._keep(outcome)

    def build(self) -> None:
        """Build for this GPU alone, and report what its kernels take."""
        environment = {
            "CUDAARCHS": self._architecture,
            "PIPEKERNELS_CUDA": "1",
            "PIPEKERNELS_KERNEL_REPORT": "1",
        }
        outcome = self.step("build", [*PYTHON, "csrc/cmake/build_extension.py"], environment)
        if outcome.status == "passed":
            compiled = ROOT / "build" / "gpu-check.log"  # those that were compiled anew
            compiled.write_text(outcome.output)
            self.step("kernels", [*PYTHON, "csrc/cmake/kernel_report.py", str(compiled)])

    def tests(self) -> None:
        """The tests, several at a time, but one of those that start ranks."""
        # All of them would take hours on few cores; these are enough to see that they run.
        files = FIRST if self._dry else cuda_files()
        deadline = self._deadline("tests")

        def run(name: str, marked: str, together: int) -> Outcome:
            command = pytest_command(TEST_SECONDS, together, ["-m", marked, *files])
            return run_step(name, command, {}, deadline)

        with ThreadPoolExecutor() as pool:
            for outcome in pool.map(run, *zip(*MARKED, strict=True)):
                self._keep(tested(outcome, must_run=not self._dry))

    def sanitizers(self) -> None:
        """compute-sanitizer, all runs at the same time."""
        with ThreadPoolExecutor(len(SANITIZERS)) as pool:
            self.sanitized = list(pool.map(self._sanitize, SANITIZERS))

    def _sanitize(self, sanitizer: tuple[str, str, list[str], dict[str, str]]) -> Outcome:
        name, tool, parts, environment = sanitizer
        toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        path = f"{os.environ.get('PATH', '')}:{toolkit}/bin"
        program = None if self._dry else shutil.which("compute-sanitizer", path=path)
        if program is None:
            return Outcome(name, "skipped", note="compute-sanitizer is not installed")
        command = [program, "--tool", tool, "--error-exitcode", "86", *OPTIONS[tool]]
        command += [*PYTHON, "-m", "bench.gpu.sanitized", *parts]
        outcome = run_step(name, command, environment, self._deadline("sanitizers"))
        self._write(f"\n==== {name}\n{outcome.output}")
        if "Device not supported" in outcome.output:
            return outcome._replace(status="skipped", note="it does not support this machine")
        return outcome

    def finish(self) -> bool:
        """Log the summary; returns whether no step failed."""
        late = [step.name for step in self.outcomes if step.status == "not run"]
        self._write(
            "\n".join(["\n==== summary", *map(str, self.outcomes)])
            + f"\n\nnot run for lack of time: {', '.join(late) or 'nothing'}\n\n"
            + "\n".join(["compute-sanitizer (fails nothing):", *map(str, self.sanitized)])
            + f"\n\n{time.monotonic() - self._begin:.0f} s; results are in {self._folder}\n"
        )
        self._log.close()
        return all(outcome.good for outcome in self.outcomes)

    def _keep(self, outcome: Outcome) -> Outcome:
        self._write(f"\n==== {outcome.name}\n{outcome.output}")
        self.outcomes.append(outcome)
        return outcome

    def _write(self, text: str) -> None:
        with self._lock:
            for stream in (self._log, sys.stdout):
                stream.write(text)
                stream.flush()

    def _deadline(self, name: str) -> float:
        return self._begin + DEADLINES[name]


def cuda_files() -> list[str]:
    """Files that may have tests marked ``cuda``; :data:`FIRST` first."""
    names = re.compile(r"\b(cuda|device|place)\b")
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if names.search(path.read_text())]
    return [*FIRST, *sorted({str(path.relative_to(ROOT)) for path in found} - {*FIRST})]


def pytest_command(seconds: int, together: int, arguments: Sequence[str]) -> list[str]:
    """Run these tests, each of which may take so long, by so many workers, which are replaced when
    a test ends one, if pytest-xdist is there."""
    limits = ["--timeout", str(seconds), "--timeout-method", "thread"]
    if importlib.util.find_spec("xdist") is not None:
        limits += ["-n", str(min(together, CORES))]
    return [*PYTEST, "--continue-on-collection-errors", *limits, *arguments]


def tested(outcome: Outcome, *, must_run: bool) -> Outcome:
    """The outcome of a run of pytest; ``must_run``: that it skips all tests is a failure."""
    counts = Counter(TESTED.findall(outcome.output))
    bad = counts["FAILED"] + counts["ERROR"]
    names = dict.fromkeys(re.findall(r"\b(?:FAILED|ERROR) +(tests\S+::\S+)", outcome.output))
    note = ", ".join(f"{count} {kind.lower()}" for kind, count in sorted(counts.items()))
    note = "; ".join([note or outcome.note, *names])
    status = outcome.status
    if status == "timed out" and counts and not bad:
        status, note = "not run", f"{note}; no time was left for the others"
    elif status == "passed" and not counts["PASSED"]:
        status = "failed" if must_run else "skipped"
    return outcome._replace(status=status, note=note)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check", description=__doc__)
    parser.add_argument("--built", action="store_true", help="take the extension that is there")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in build/gpu-check")
    args = parser.parse_args(arguments)
    if args.dry_run:
        dry = Check(ROOT / "build" / "gpu-check", "90", dry=True)
        return 0 if dry.run(built=args.built) else 1
    asked = subprocess.run(  # Not in this process: a broken CUDA may break it.
        [*PYTHON, "-c", GPU], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if asked.returncode:
        print(
            f"gpu-check: {asked.stderr.strip().splitlines()[-1]}\n{sys.executable} has no torch "
            "that sees a CUDA GPU. Run it on a machine with one, with PYTHON=<a Python whose torch "
            "has CUDA>; make cuda-check compiles without a GPU.",
            file=sys.stderr,
        )
        return 1
    folder, architecture = json.loads(asked.stdout.splitlines()[-1])
    return 0 if Check(Path(folder), architecture).run(built=args.built) else 1


if __name__ == "__main__":
    sys.exit(main())
