"""``make gpu-check``: asks the questions of a file, ``bench/gpu/questions.toml``, in ten minutes.

Uses the Python that starts it, which needs torch with CUDA, pytest, pytest-timeout, hypothesis,
pybind11, CMake and Ninja, but no network. With pytest-xdist, a test that hangs or crashes affects
no other. An extension that was built for that Python and this GPU is taken as it is, else one is
built. Every question is a process with a deadline of its own; whatever one does, the others are
asked, in the order of the file. What is left of the ten minutes goes to the last one. With
``--dry-run`` a machine without a GPU runs what it can of each question, on the CPU.

Results go to ``$OUT``, or else ``bench/results/<gpu>``, at once:

* ``gpu_check.log``: all output, with the summary at the end; ``gpu_check.json``: the outcomes.
* ``clocks.csv``: clocks and power of the GPU, once a second.
* ``gpu.NAME.json``: the results of a benchmark, up to where it may have been stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
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
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there.

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-u"]
QUESTIONS = Path(__file__).with_name("questions.toml")
MOST = 600.0  # seconds of all questions, with the build
GPU = """
import json, torch
from bench import records
assert torch.cuda.is_available(), f"torch {torch.__version__} sees no CUDA GPU"
gpu = torch.cuda.get_device_properties(0)
print(json.dumps([str(records.results_folder()), f"{gpu.major}{gpu.minor}"]))
"""
IMPORT = """
from pipekernels import _backend, _version
built = _backend.build_info()
assert built["version"] == _version.__version__, "it is of another version"
assert built["cuda"] or {dry}, "it was built without CUDA"
assert {dry} or "{architecture}" in built["cuda_architectures"], "it is for other GPUs"
print("note: for", built.get("cuda_architectures"), "by CUDA", built.get("cuda_version"))
"""
CLOCKS = "exec nvidia-smi -l 1 --format=csv --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw"
SKIPPED = 77  # exit status of a command that cannot run here; its last line says why
PATIENCE = 5.0  # seconds to print stacks after a timeout, and to die
ENDING = 10  # seconds of a benchmark's share that are reserved for its end
# Files whose tests are run first: kernels that were least tested without a GPU.
FIRST = [
    "tests/comm/test_cuda_collectives.py",
    "tests/comm/test_all_reduce.py",
    "tests/ops/test_sharded_gemm.py",
    "tests/ops/test_p2p_copy.py",
    "tests/tensor_parallel/test_linear.py",
]
PYTEST = [*PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rfE", "--tb=short"]
CORES = len(os.sched_getaffinity(0))
TEST_SECONDS = 90  # for one test; a few start processes that each load torch and CUDA
# What pytest -v prints of a test, with pytest-xdist and without.
TESTED = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] |tests\S+::.* )(PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE
)


class Question(NamedTuple):
    """A table of the file. ``run`` (of a shell), ``code`` (after the file's ``prelude``), ``tests``
    (pytest's expression of markers), ``bench`` (a benchmark) or ``sanitizer`` (its arguments) says
    how it is asked.

    Attributes:
        name: by which ``--only`` knows it.
        seconds: that it may take; all that are left if the file does not say.
        together: tests that run at the same time.
        group: neighbours of the same group are asked at the same time.
        environment: further variables.
        gates: whether a failure is one of the whole check.
    """

    name: str
    seconds: float = math.inf
    run: str = ""
    code: str = ""
    tests: str = ""
    together: int = 1
    bench: str = ""
    sanitizer: str = ""
    group: str = ""
    environment: Mapping[str, str] = {}
    gates: bool = True

    def command(self, seconds: float, *, dry: bool) -> list[str]:
        """What asks it; ``seconds`` are left."""
        python = shlex.quote(sys.executable)
        if self.run:
            return ["sh", "-c", self.run.replace("{python}", python)]
        if self.code:
            return [*PYTHON, "-c", self.code]
        if self.tests:
            # All of them would take hours on few cores; these are enough to see that they run.
            files = FIRST if dry else cuda_files()
            return pytest_command(TEST_SECONDS, self.together, ["-m", self.tests, *files])
        if self.bench:
            limit = ["--seconds", str(max(1, int(seconds) - ENDING))]
            on_cpu = ["--quick", "--device", "cpu"] if dry else []
            return [*PYTHON, "-m", "bench", self.bench, *limit, *on_cpu]
        toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        path = f"{os.environ.get('PATH', '')}:{toolkit}/bin"
        program = None if dry else shutil.which("compute-sanitizer", path=path)
        if program is None:
            return ["sh", "-c", f"echo compute-sanitizer is not installed; exit {SKIPPED}"]
        arguments = self.sanitizer.replace("{python}", python)
        return ["sh", "-c", f"{program} --error-exitcode 86 {arguments}"]


def questions(path: Path, only: Sequence[str] = ()) -> list[Question]:
    """The questions of a file, in its order; ValueError if ``only`` names one that it lacks."""
    content: dict[str, Any] = tomllib.loads(path.read_text())
    for table in content["question"]:
        if "code" in table:
            table["code"] = content["prelude"] + table["code"]
    found = [Question(**table) for table in content["question"]]
    names = [question.name for question in found]
    if unknown := set(only) - set(names):
        raise ValueError(f"no question {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [question for question in found if not only or question.name in only]


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


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Check:
    """One run of all questions.

    Args:
        folder: where results go.
        architecture: of the GPU, such as ``'90'``.
        dry: whether there is no GPU.
    """

    def __init__(self, folder: Path, architecture: str, *, dry: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.outcomes: list[Outcome] = []
        self._folder, self._architecture, self._dry = folder, architecture, dry
        self._log = (folder / "gpu_check.log").open("w")
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._good = True

    def run(self, asked: Sequence[Question]) -> bool:
        """Ask all; returns whether none failed."""
        with (self._folder / "clocks.csv").open("w") as file:
            clocks = subprocess.Popen(["sh", "-c", CLOCKS], stdout=file, stderr=file)
            if self._has_extension():
                for _, group in itertools.groupby(asked, lambda each: each.group or each.name):
                    with ThreadPoolExecutor() as pool:
                        list(pool.map(self._ask, group))
            clocks.kill()
            clocks.wait()
        late = [outcome.name for outcome in self.outcomes if outcome.status == "not run"]
        self._write(
            "\n".join(["\n==== summary", *map(str, self.outcomes)])
            + f"\n\nnot run for lack of time: {', '.join(late) or 'nothing'}\n\n"
            + f"{time.monotonic() - self._begin:.0f} s; results are in {self._folder}\n"
        )
        self._log.close()
        return self._good

    def _has_extension(self) -> bool:
        """Take the extension that is there, or build it for this GPU alone."""
        code = IMPORT.format(dry=self._dry, architecture=self._architecture)
        found = Question("extension", 30, run=f"{{python}} -c {shlex.quote(code)}", gates=False)
        if self._ask(found).status == "passed" or self._dry:
            return True
        # The second command shows what the kernels take.
        log = "build/gpu-check.log"
        command = f"mkdir -p build; export PIPEKERNELS_CUDA=1 CUDAARCHS={self._architecture}; "
        command += (
            f"PIPEKERNELS_KERNEL_REPORT=1 {{python}} csrc/cmake/build_extension.py > {log} 2>&1 "
        )
        command += f"|| {{ cat {log}; exit 1; }}; {{python}} csrc/cmake/kernel_report.py {log}"
        self._ask(Question("build", 110, run=command))
        return self._ask(found._replace(name="built extension", gates=True)).good

    def _ask(self, question: Question) -> Outcome:
        now = time.monotonic()
        patience = 5 if self._dry else 1  # A few cores do what a GPU's machine does.
        deadline = min(now + patience * question.seconds, self._begin + patience * MOST)
        command = question.command(deadline - now, dry=self._dry)
        outcome = run_step(question.name, command, question.environment, deadline)
        if question.tests:
            outcome = tested(outcome, must_run=not self._dry)
        if "Device not supported" in outcome.output and question.sanitizer:
            outcome = outcome._replace(status="skipped", note="it does not support this machine")
        self._write(f"\n==== {outcome.name}\n{outcome.output}")
        with self._lock:
            self._good = self._good and (outcome.good or not question.gates)
            self.outcomes.append(outcome)
            rows = [each._replace(output="")._asdict() for each in self.outcomes]
            (self._folder / "gpu_check.json").write_text(json.dumps(rows, indent=1) + "\n")
        return outcome

    def _write(self, text: str) -> None:
        with self._lock:
            for stream in (self._log, sys.stdout):
                stream.write(text)
                stream.flush()


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
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some questions")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="a file of them")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in build/gpu-check")
    args = parser.parse_args(arguments)
    try:
        asked = questions(args.questions, args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.dry_run:
        return 0 if Check(ROOT / "build" / "gpu-check", "90", dry=True).run(asked) else 1
    found = subprocess.run(  # Not in this process: a broken CUDA may break it.
        [*PYTHON, "-c", GPU], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if found.returncode:
        print(
            f"gpu-check: {found.stderr.strip().splitlines()[-1]}\n{sys.executable} has no torch "
            "that sees a CUDA GPU. Run it on a machine with one, with PYTHON=<a Python whose torch "
            "has CUDA>; make cuda-check compiles without a GPU.",
            file=sys.stderr,
        )
        return 1
    folder, architecture = json.loads(found.stdout.splitlines()[-1])
    return 0 if Check(Path(folder), architecture).run(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
