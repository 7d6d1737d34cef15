"""Runs the tests marked ``cuda`` in several processes, so that a crash affects only one of them.

A process runs up to :data:`PIECE` tests. A test that hangs or crashes ends its process;
the tests after it run in a new one. Processes are forked from a server that has imported torch, as
imports would take longer than most pieces; it never initialises CUDA.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.steps import Log, Running

PIECE = 48  # tests, so many that a start of CUDA, of seconds, does not matter
TEST_SECONDS = 90  # for one test; a few start processes that each load torch and CUDA
COLLECT_SECONDS = 60.0
# Files whose tests are run first: kernels that were least tested without a GPU.
FIRST = [
    "tests/comm/test_cuda_collectives.py",
    "tests/comm/test_all_reduce.py",
    "tests/local_ops/test_sharded_gemm.py",
    "tests/local_ops/test_p2p_copy.py",
    "tests/tensor_parallel/test_linear.py",
    "tests/local_ops/test_micro_batch.py",
]
# Their tests compile kernels, for seconds each: run in smaller pieces.
COMPILING = {"tests/local_ops/test_sharded_gemm.py"}
SMALL_PIECE = 6
OUTCOME = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
OPTIONS = ["-p", "no:cacheprovider"]
# Ranks that are processes take turns on the GPU, with each other and with whatever else uses it.
SHARING, ALONE = "cuda and not processes", "cuda and processes"
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "numpy", "pytest", "hypothesis", "triton", "pipekernels.ops"]
)


class Pytest(Running):
    """pytest in a process forked from the server, in a session that can be killed.

    Args:
        arguments: of pytest.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="cuda-tests-", delete=False) as file:
            self._output = Path(file.name)
        self._process = SERVER.Process(
            target=run_pytest, args=(list(arguments), str(self._output), os.getcwd())
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def join(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def close(self) -> None:
        """Remove the file of its output."""
        self._output.unlink(missing_ok=True)


def run_pytest(arguments: list[str], output: str, folder: str) -> None:
    """The body of a forked process. Never returns."""
    os.setsid()
    os.chdir(folder)
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    os.environ["PYTHONFAULTHANDLER"] = "1"  # for ranks that a test starts
    sys.path.insert(0, folder)
    import pytest

    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(int(status))


@dataclass
class Result:
    """Outcomes of some tests.

    Attributes:
        outcomes: by test: ``'passed'``, ``'failed'``, ``'skipped'``, ``'error'``, ``'crashed'`` (it
            ended its process, or hung) or ``'not run'``.
        seconds: how long they took.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def named(self, *outcomes: str) -> list[str]:
        return [test for test, outcome in self.outcomes.items() if outcome in outcomes]


def collect(marked: str, log: Log, size: int = PIECE) -> list[list[str]]:
    """All tests so ``marked``, in pieces of up to ``size`` tests; :data:`FIRST` first.

    If pytest fails, its output is written to ``log``, and the tests that it found are returned.
    """
    process = Pytest([*OPTIONS, "-m", marked, "--collect-only", "-q"])
    status, output = process.wait(COLLECT_SECONDS), process.output
    process.close()
    if status not in (0, 5):  # 5: nothing is marked
        log.write(output)  # files that cannot be imported; the others are run
        if status not in (1, 2):  # None is deselected.
            return []
    files: dict[str, list[str]] = {}
    for line in output.splitlines():
        file, separator, _ = line.partition("::")
        if separator and file.endswith(".py"):
            files.setdefault(file, []).append(line)
    pieces: list[list[str]] = []
    room = 0  # in the last piece
    for file in sorted(files, key=lambda file: FIRST.index(file) if file in FIRST else len(FIRST)):
        compiles = file in COMPILING
        room = 0 if compiles else room
        for test in files[file]:
            if room == 0:
                pieces.append([])
                room = min(size, SMALL_PIECE) if compiles else size
            pieces[-1].append(test)
            room -= 1
        room = 0 if compiles else room
    return pieces


def run(
    tests: Sequence[str], deadline: float, log: Log, test_seconds: int = TEST_SECONDS
) -> Result:
    """Run some tests until ``deadline`` (of ``time.monotonic``) at most, or until a
    process cannot be killed."""
    begin = time.monotonic()
    result = Result()
    while len(result.outcomes) < len(tests) and time.monotonic() < deadline:
        if Running.unkillable:
            break
        left = [test for test in tests if test not in result.outcomes]
        limits = ["--timeout", str(test_seconds), "--timeout-method", "thread"]
        process = Pytest([*OPTIONS, "-v", "-rfE", *limits, *left])
        status, output = process.wait(deadline - time.monotonic()), process.output
        process.close()
        log.write(f"\n---- {left[0]} and on\n{output}")
        found, running = parse(output, set(tests))
        result.outcomes |= found
        if status is None:  # out of time
            break
        if running is None and found and status not in (0, 1):
            running = list(found)[-1]  # which ended the session when it was done
        if running is None:
            break
        result.outcomes[running] = "crashed"
    result.outcomes |= {test: "not run" for test in tests if test not in result.outcomes}
    result.seconds = time.monotonic() - begin
    return result


def parse(output: str, tests: set[str]) -> tuple[dict[str, str], str | None]:
    """The outcomes that ``pytest -v`` printed, and the test that was running when it ended."""
    outcomes: dict[str, str] = {}
    running = None
    for line in output.splitlines():
        if "::" not in line:
            continue
        match = OUTCOME.search(line)
        test = line[: match.start()] if match else line.rstrip()
        if test not in tests:
            # Output of a dying process may follow the name on its line.
            test = next((t for t in sorted(tests, key=len, reverse=True) if line.startswith(t)), "")
            match = None
        if not test:
            continue
        if match is None:
            running = test
            continue
        running = None
        outcome = match[1].lower().replace("xfail", "passed").replace("xpass", "failed")
        if outcomes.get(test) not in ("failed", "error"):  # an error of its teardown comes after
            outcomes[test] = outcome
    return outcomes, running


def summary(results: Sequence[Result]) -> str:
    """A line per file, and a line for every test that neither passed nor was skipped."""
    files: dict[str, Result] = {}
    for result in results:
        for test, outcome in result.outcomes.items():
            files.setdefault(test.partition("::")[0], Result()).outcomes[test] = outcome
    lines = [f"{sum(result.seconds for result in results):.0f} s of processes"]
    for file, result in files.items():
        counts = Counter(sorted(result.outcomes.values()))
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        lines.append(f"{file}: {told}")
        lines += [
            f"  {result.outcomes[test]}: {test}"
            for test in result.named("failed", "error", "crashed", "not run")
        ]
    return "\n".join(lines)
