"""``make gpu-check``: builds for the local GPU, then tests, measures and checks, in 8 minutes.

After the build the first step (``bench/gpu/smoke.py``) tells within a minute what works at all. The
tests are next; beside them, on idle cores, the tuner's candidates are compiled. Benchmarks then
have the machine for themselves, and compute-sanitizer, the slowest, comes last: what it finds is
shown, and fails nothing.

Uses the Python that starts it, which needs torch with CUDA, pytest, pytest-timeout, hypothesis,
pybind11, CMake and Ninja, but no network. If a step fails, the others are still run; if it is the
build, on an extension built before, as with ``--built``. With ``--dry-run`` a machine without a GPU
runs what it can of each step, on the CPU: whether all of them start and report. The summary at the
end and the exit status report failures; what there was no time for is listed apart. Results go to
``$OUT``, or else ``bench/results/<gpu>``, in at most eight files:

* ``gpu_check.log``: all output, with the summary at the end.
* ``gpu.NAME.json``: the results of a benchmark, up to where it may have been stopped.
* ``<gpu>.json``: the tuner's measurements, to be shipped in ``pipekernels/kernels/tables``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.gpu import cuda_tests
from bench.gpu.steps import SKIPPED, Log, Outcome, run_step

ROOT = Path(__file__).parent.parent.parent
# Seconds of each step, 8 minutes in all. Time that a step does not use goes to the later ones.
SHARES = {
    "environment": 15,
    "build": 110,
    "smoke": 45,
    "kernels": 5,
    "info": 10,
    "tests": 95,
    "gpu.micro_batch": 20,
    "gpu.pipe": 25,
    "gpu.all_reduce": 35,
    "gpu.p2p_copy": 15,
    "gpu.soak": 15,
    "gpu.sharded_gemm": 40,
    "sanitizers": 50,
}
IMPORT = """
from pipekernels import _backend
built = _backend.build_info()
assert built["cuda"] or {dry}, "the extension was built without CUDA"
print("note: for", built.get("cuda_architectures"), "by CUDA", built.get("cuda_version"))
"""
ENDING = 10  # seconds of a benchmark's share that are reserved for its end
TOGETHER = 8  # test processes at the same time
SMOKE_SECONDS = 25.0  # for a case, with the import of torch and the start of CUDA
SMOKE_TOGETHER = 4  # cases at a time
# Cases of bench/gpu/smoke.py, which this process does not import: they may break it.
SMOKE = [
    "copy",
    "all-reduce, 1 thread",
    "all-reduce, 2 threads",
    "all-reduce, 2 processes",
    "product, bfloat16",
    "product, float16",
    "product, tfloat32",
    "product, float32",
    "product, float8_e4m3fn",
    "capture and replay",
    "a rank that never comes",
]
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


class Check:
    """One run of all steps.

    Args:
        folder: where results go.
        architecture: of the GPU, such as ``'90'``.
        sms: its number of multiprocessors.
        dry: whether there is no GPU.
    """

    def __init__(self, folder: Path, architecture: str, sms: int, *, dry: bool = False) -> None:
        self.log = Log(folder / "gpu_check.log")
        self.outcomes: list[Outcome] = []
        self.sanitized: list[Outcome] = []
        self.tested: list[cuda_tests.Result] = []
        self._folder = folder
        self._architecture = architecture
        self._sms = sms
        self._dry = dry
        self._begin = time.monotonic()

    def run(self, *, built: bool = False) -> bool:
        """Run all steps, the build only if not ``built`` before; returns whether none failed."""
        python = [sys.executable, "-u"]
        self.step("environment", [*python, "-m", "bench.gpu.environment"])
        if not built:
            self.build()
        if self.importable():
            self.smoke("cpu" if self._dry else "cuda")
            self.step("info", [*python, "-m", "pipekernels", "info"])
            self.tests()
            for name in SHARES:
                if name.startswith("gpu."):
                    seconds = max(1, int(self._deadline(name) - time.monotonic()) - ENDING)
                    command = [*python, "-m", "bench.gpu", name.removeprefix("gpu.")]
                    dry = ["--quick", "--device", "cpu"] if self._dry else []
                    self.step(name, [*command, "--seconds", str(seconds), *dry])
            self.sanitizers()
        return self.finish()

    def build(self) -> None:
        """Build for this GPU alone, and report what its kernels take."""
        environment = {
            "CUDAARCHS": self._architecture,
            "PIPEKERNELS_CUDA": "1",
            "PIPEKERNELS_KERNEL_REPORT": "1",
        }
        python = [sys.executable, "-u"]
        outcome = self.step("build", [*python, "csrc/cmake/build_extension.py"], environment)
        if outcome.status == "passed":
            compiled = ROOT / "build" / "gpu-check.log"  # those that were compiled anew
            compiled.write_text(outcome.output)
            self.step("kernels", [*python, "csrc/cmake/kernel_report.py", str(compiled)])

    def importable(self) -> bool:
        """Whether there is an extension with CUDA, built now or before."""
        command = [sys.executable, "-c", IMPORT.format(dry=self._dry)]
        limit = self._begin + sum(SHARES.values())
        outcome = run_step("extension", command, {}, limit, self.log)
        self.outcomes.append(outcome)
        return outcome.status == "passed"

    def step(
        self, name: str, command: list[str], environment: dict[str, str] | None = None
    ) -> Outcome:
        """Run one command until the end of its share."""
        outcome = run_step(name, command, environment or {}, self._deadline(name), self.log)
        self.outcomes.append(outcome)
        return outcome

    def smoke(self, device: str = "cuda") -> None:
        """A process for each case, a few at a time, and a line as each of them ends."""
        begin = time.monotonic()

        def one(name: str) -> Outcome:
            command = [sys.executable, "-u", "-m", "bench.gpu.smoke", name, "--device", device]
            limit = min(self._deadline("smoke"), time.monotonic() + SMOKE_SECONDS)
            found = run_step(name, command, {}, limit, None)
            title = {"passed": "PASS", "skipped": "SKIP"}.get(found.status, "FAIL")
            note = found.note if found.status == "passed" else f"{found.status}: {found.note}"
            told = "" if found.good else found.output
            self.log.write(f"{title} {name:<24} {found.seconds:4.1f} s  {note}\n{told}")
            return found

        self.log.write("\n==== smoke\n")
        with ThreadPoolExecutor(SMOKE_TOGETHER) as pool:
            found = list(pool.map(one, SMOKE))
        bad = [outcome.name for outcome in found if not outcome.good]
        note = f"{len(found)} cases" + f", {len(bad)} failed: {'; '.join(bad)}" * bool(bad)
        status = "failed" if bad else "passed"
        self.outcomes.append(Outcome("smoke", status, time.monotonic() - begin, note))

    def tests(self) -> None:
        """The tests, several processes at a time, but one of those that start ranks; and beside
        them the compilation of the tuner's candidates."""
        begin = time.monotonic()
        deadline = self._deadline("tests")
        command = [sys.executable, "-u", "-m", "bench.gpu.precompile"]
        command += [self._architecture, str(self._sms)]
        if self._dry:  # For hours, on few cores.
            command = [sys.executable, "-c", f"print('not in a dry run'); exit({SKIPPED})"]
        with ThreadPoolExecutor(TOGETHER) as pool, ThreadPoolExecutor(1) as lane:
            compiling = pool.submit(
                run_step, "tuner's kernels", command, {}, deadline, self.log, live=False
            )
            marks = {cuda_tests.ALONE: lane, cuda_tests.SHARING: pool}
            found = {mark: pool.submit(cuda_tests.collect, mark, self.log) for mark in marks}
            pieces = [
                marks[mark].submit(cuda_tests.run, tests, deadline, self.log)
                for mark, collected in found.items()
                for tests in collected.result()
            ]
            self.tested = [piece.result() for piece in pieces]
            seconds = time.monotonic() - begin
        outcomes = Counter(outcome for piece in self.tested for outcome in piece.outcomes.values())
        tests, skipped, late = outcomes.total(), outcomes["skipped"], outcomes["not run"]
        bad = tests - skipped - late - outcomes["passed"]
        note = f"{tests} tests, {bad} failed, {skipped} skipped, {late} not run for lack of time"
        status = "passed" if outcomes["passed"] else "not run"
        if bad or skipped == tests:
            status = "skipped" if self._dry and not bad else "failed"
        self.outcomes.append(Outcome("tests", status, seconds, note))
        self.outcomes.append(compiling.result())

    def sanitizers(self) -> None:
        """compute-sanitizer, all runs at the same time."""
        deadline = self._deadline("sanitizers")
        with ThreadPoolExecutor(len(SANITIZERS)) as pool:
            runs = [pool.submit(self._sanitize, *sanitizer, deadline) for sanitizer in SANITIZERS]
        self.sanitized = [run.result() for run in runs]

    def _sanitize(
        self, name: str, tool: str, parts: list[str], environment: dict[str, str], deadline: float
    ) -> Outcome:
        sanitizer = None if self._dry else _sanitizer()
        if sanitizer is None:
            return Outcome(name, "skipped", 0.0, "there is no compute-sanitizer")
        command = [sanitizer, "--tool", tool, "--error-exitcode", "86", *OPTIONS[tool]]
        command += [sys.executable, "-u", "-m", "bench.gpu.sanitized", *parts]
        outcome = run_step(name, command, environment, deadline, self.log, live=False)
        if "Device not supported" in outcome.output:
            return Outcome(name, "skipped", outcome.seconds, "it does not support this machine")
        return outcome

    def finish(self) -> bool:
        """Log the summary; returns whether no step failed."""
        seconds = time.monotonic() - self._begin
        late = [step.name for step in self.outcomes if step.status == "not run"]
        self.log.write(
            f"\n==== summary\n{cuda_tests.summary(self.tested)}\n\n{_lines(self.outcomes)}"
            f"\n\nnot run for lack of time: {', '.join(late) or 'nothing'}"
            f"\n\ncompute-sanitizer (fails nothing):\n{_lines(self.sanitized)}"
            f"\n\n{seconds:.0f} s; results are in {self._folder}\n"
        )
        return all(outcome.good for outcome in self.outcomes)

    def _deadline(self, name: str) -> float:
        seconds = 0
        for step, share in SHARES.items():
            seconds += share
            if step == name:
                break
        return self._begin + seconds


def _lines(outcomes: list[Outcome]) -> str:
    return "\n".join(
        f"{outcome.name:<26} {outcome.status:<10} {outcome.seconds:4.0f} s  {outcome.note}"
        for outcome in outcomes
    )


def _sanitizer() -> str | None:
    """compute-sanitizer's path."""
    places = [os.environ.get("PATH", "")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        places.append(str(Path(nvcc).resolve().parent))
    places += [
        f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([*places, "/usr/local/cuda/bin"]))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check", description=__doc__)
    parser.add_argument("--built", action="store_true", help="take the extension that is there")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in build/gpu-check")
    args = parser.parse_args(arguments)
    os.chdir(ROOT)
    if args.dry_run:
        dry = Check(ROOT / "build" / "gpu-check", "90", 132, dry=True)
        return 0 if dry.run(built=args.built) else 1
    command = [sys.executable, "-m", "bench.gpu.environment", "--brief"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if asked.returncode:
        print(
            f"gpu-check: {asked.stderr.strip()}\n{sys.executable} has no torch that sees a CUDA "
            "GPU. Run it on a machine with one, with PYTHON=<a Python whose torch has CUDA>; make "
            "cuda-check compiles without a GPU.",
            file=sys.stderr,
        )
        return 1
    found = json.loads(asked.stdout.splitlines()[-1])
    check = Check(Path(found["folder"]), found["architecture"], found["sms"])
    return 0 if check.run(built=args.built) else 1


if __name__ == "__main__":
    sys.exit(main())
