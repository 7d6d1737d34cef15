"""The parts of `make gpu-check`, on the CPU: steps, smoke, tests in processes, and the whole."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import registry
from bench.gpu import check, cuda_tests, smoke, steps

GPU = list(registry.GPU)
pytestmark = [pytest.mark.full, pytest.mark.project]


@pytest.fixture
def log(tmp_path: Path) -> steps.Log:
    return steps.Log(tmp_path / "log")


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# ---- steps ----


def test_a_step_reports_its_status_and_logs_its_output(log: steps.Log, tmp_path: Path) -> None:
    code = "import os, sys; print('out'); print(os.environ['X'], file=sys.stderr); sys.exit({})"
    good = steps.run_step("good", python(code.format(0)), {"X": "there"}, in_seconds(60), log)
    bad = steps.run_step("bad", python(code.format(3)), {"X": "y"}, in_seconds(60), log, live=False)
    assert (good.status, good.good, good.output) == ("passed", True, "out\nthere\n")
    assert (bad.status, bad.good, bad.note) == ("failed", False, "exit status 3: y")
    assert (tmp_path / "log").read_text() == "\n==== good\nout\nthere\n\n==== bad\nout\ny\n"


def test_a_hanging_step_says_where_and_is_killed_with_its_children(
    log: steps.Log, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "def stuck(): time.sleep(600)\n"
        "stuck()"
    )
    outcome = steps.run_step("hang", python(code), {}, in_seconds(4), log)
    assert outcome.status == "timed out" and not outcome.good
    assert "in stuck" in outcome.output
    deadline = in_seconds(20)
    while Path(f"/proc/{pid.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = Path(f"/proc/{pid.read_text()}/stat")
    assert not child.exists() or child.read_text().rpartition(") ")[2].startswith("Z")


def test_a_step_ends_although_a_daemon_that_it_left_holds_its_output(
    log: steps.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon has a session of its own, so it is not killed with the step."""
    monkeypatch.setattr(steps, "PATIENCE", 1.0)
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "print('done')"
    )
    try:
        outcome = steps.run_step("daemon", python(code), {}, in_seconds(60), log)
        assert (outcome.status, outcome.output) == ("passed", "done\n")
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_step_that_cannot_be_started_fails(log: steps.Log) -> None:
    outcome = steps.run_step("none", ["/no/such/program"], {}, in_seconds(60), log)
    assert outcome.status == "failed" and "/no/such/program" in outcome.note


def test_a_command_that_cannot_run_here_is_skipped(log: steps.Log) -> None:
    code = f"import sys; print('no such GPU'); sys.exit({steps.SKIPPED})"
    outcome = steps.run_step("skip", python(code), {}, in_seconds(60), log)
    assert (outcome.status, outcome.note, outcome.good) == ("skipped", "no such GPU", True)


def test_a_step_without_time_is_not_run(log: steps.Log) -> None:
    outcome = steps.run_step("late", python(""), {}, in_seconds(-1), log)
    assert (outcome.status, outcome.note) == ("not run", "no time was left for it")
    assert outcome.good


def test_a_process_that_the_driver_holds_ends_the_use_of_the_gpu(
    log: steps.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PATIENCE", 0.2)
    monkeypatch.setattr(steps.Process, "unkillable", [])
    monkeypatch.setattr(steps.Process, "_signal", lambda self, number: None)  # As if it had none.
    stuck = steps.run_step("stuck", python("import time; time.sleep(600)"), {}, in_seconds(1), log)
    [pid] = steps.Process.unkillable
    try:
        assert (stuck.status, stuck.good) == ("unkillable", False)
        assert (
            stuck.note.startswith(f"process {pid} did not end after SIGKILL") and stuck.seconds < 5
        )
        after = steps.run_step("after", python(""), {}, in_seconds(60), log)
        assert (after.status, after.note) == ("not run", f"process {pid} holds the GPU")
        tests = cuda_tests.run(["a.py::t"], in_seconds(60), log)
        assert tests.outcomes == {"a.py::t": "not run"}
    finally:
        os.kill(pid, signal.SIGKILL)


# ---- smoke ----

IN_PROCESSES = ["all-reduce, 2 processes", "capture and replay", "a rank that never comes"]


def test_the_check_knows_all_smoke_cases() -> None:
    assert list(smoke.CASES) == check.SMOKE


@pytest.mark.parametrize("name", [name for name in check.SMOKE if name not in IN_PROCESSES])
def test_smoke_cases(name: str, one_thread: None) -> None:
    smoke.CASES[name](torch.device("cpu"))


@pytest.mark.parametrize("name", ["copy", "product, float8_e4m3fn", "all-reduce, 1 thread"])
def test_smoke_cases_notice_one_wrong_element(
    name: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> torch.Tensor:
            result = function(*args, **options)
            result.view(-1)[-1] = -999
            return result

        return call

    monkeypatch.setattr(smoke, "concat_micro_batches", wrong(smoke.concat_micro_batches))
    monkeypatch.setattr(smoke.ops, "sharded_gemm", wrong(smoke.ops.sharded_gemm))
    all_reduce = smoke.Communicator.all_reduce
    monkeypatch.setattr(smoke.Communicator, "all_reduce", wrong(all_reduce))
    with pytest.raises(AssertionError):
        smoke.CASES[name](torch.device("cpu"))


def smoke_of(
    cases: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[steps.Outcome, list[str]]:
    """The step's outcome, and the lines that it logged."""
    monkeypatch.setattr(check, "SMOKE", cases)
    run = check.Check(tmp_path, "90", 132)
    run.smoke("cpu")
    (outcome,) = run.outcomes
    lines = (tmp_path / "gpu_check.log").read_text().splitlines()
    return outcome, [" ".join(line.split()) for line in lines]


@pytest.mark.slow
def test_smoke_cases_of_ranks_that_are_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "SMOKE_SECONDS", 60.0)
    monkeypatch.setitem(check.SHARES, "smoke", 90)
    outcome, lines = smoke_of(IN_PROCESSES, tmp_path, monkeypatch)
    assert (outcome.status, outcome.note) == ("passed", "3 cases"), "\n".join(lines)
    assert any(line.startswith("PASS all-reduce, 2 processes ") for line in lines)
    assert any(line.startswith("PASS a rank that never comes ") for line in lines)
    assert any(line.endswith("s skipped: a CPU has no CUDA graphs") for line in lines)


def test_smoke_cases_that_crash_or_hang_affect_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {
        "good": "",
        "crash": "import os; print('before'); os.abort()",
        "hang": "import time\ndef stuck(): time.sleep(600)\nstuck()",
        "wrong": "raise SystemExit('7 elements differ')",
        "last": "",
    }

    def run_step(name: str, command: list[str], *rest: Any) -> steps.Outcome:
        assert command[-3:] == [name, "--device", "cpu"]
        return steps.run_step(name, python(codes[name]), *rest)

    monkeypatch.setattr(check, "run_step", run_step)
    monkeypatch.setattr(check, "SMOKE_SECONDS", 4.0)
    outcome, lines = smoke_of(list(codes), tmp_path, monkeypatch)
    assert outcome.note == "5 cases, 3 failed: crash; hang; wrong"
    for begin in ("PASS good", "FAIL crash", "FAIL hang", "FAIL wrong", "PASS last"):
        assert len([line for line in lines if line.startswith(begin)]) == 1, begin
    assert "before" in lines and any("in stuck" in line for line in lines)
    assert any(line.endswith("failed: exit status 1: 7 elements differ") for line in lines)


# ---- tests in processes ----

TESTS = """
import os, time, pytest

pytestmark = pytest.mark.cuda

def test_good(): pass

@pytest.mark.parametrize("x", ["a b", "c"])
def test_bad(x): assert x == "c"

def test_crash(): os._exit(7)

def test_hang(): time.sleep(600)

def test_after(): pass

def test_skipped(): pytest.skip("no reason")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown")

def test_teardown(broken): pass

@pytest.fixture
def ending():
    yield
    pytest.exit("the context is broken", returncode=3)

def test_end(ending): pass

def test_last(): pass
"""


def test_a_test_that_breaks_its_process_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: steps.Log
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n cuda\n processes\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text(
        "import pytest\ndef test_on_the_cpu(): pass\n"
        "@pytest.mark.processes\n@pytest.mark.cuda\ndef test_ranks(): pass\n"
    )
    (tmp_path / "test_slow.py").write_text(TESTS.partition("def test_crash")[0])
    monkeypatch.setattr(cuda_tests, "COMPILING", {"test_slow.py"})
    monkeypatch.setattr(cuda_tests, "FIRST", ["test_slow.py"])
    monkeypatch.setattr(cuda_tests, "SMALL_PIECE", 2)
    alone = cuda_tests.collect(cuda_tests.ALONE, log)
    assert alone == [["test_none.py::test_ranks"]]
    slow, *pieces = cuda_tests.collect(cuda_tests.SHARING, log, 4)
    assert slow == ["test_slow.py::test_good", "test_slow.py::test_bad[a b]"]
    assert pieces.pop(0) == ["test_slow.py::test_bad[c]"]
    assert [len(tests) for tests in pieces] == [4, 4, 2]
    results = [cuda_tests.run(tests, in_seconds(90), log, test_seconds=3) for tests in pieces]
    outcomes = {test: outcome for result in results for test, outcome in result.outcomes.items()}
    assert {test.partition("::")[2]: outcome for test, outcome in outcomes.items()} == {
        "test_good": "passed",
        "test_bad[a b]": "failed",
        "test_bad[c]": "passed",
        "test_crash": "crashed",
        "test_hang": "crashed",
        "test_after": "passed",
        "test_skipped": "skipped",
        "test_teardown": "error",
        "test_end": "crashed",
        "test_last": "passed",
    }
    report = cuda_tests.summary(results)
    assert "test_some.py: 3 crashed, 1 error, 1 failed, 4 passed, 1 skipped\n" in report
    assert "  crashed: test_some.py::test_hang" in report and "test_good" not in report
    late = cuda_tests.run(pieces[0], in_seconds(-1), log)
    assert set(late.outcomes.values()) == {"not run"}


# ---- the whole ----


class Calls:
    """Replaces ``run_step``: records commands and environments; the steps ``failing`` fail."""

    def __init__(self, failing: set[str]) -> None:
        self.commands: dict[str, list[str]] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self._failing = failing

    def __call__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        deadline: float,
        log: steps.Log | None,
        *,
        live: bool = True,
    ) -> steps.Outcome:
        assert time.monotonic() < deadline < in_seconds(sum(check.SHARES.values()))
        self.commands[name] = command
        self.environments[name] = environment
        status = "failed" if name in self._failing else "passed"
        return steps.Outcome(name, status, 1.0, output=f"of {name}")


def run_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    failing: set[str],
    outcome: str = "passed",
    built: bool = False,
) -> tuple[bool, Calls, list[steps.Outcome]]:
    calls = Calls(failing)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(check, "run_step", calls)
    monkeypatch.setattr(check, "_sanitizer", lambda: "compute-sanitizer")
    found = {cuda_tests.SHARING: [["a.py::t"]], cuda_tests.ALONE: []}
    monkeypatch.setattr(check.cuda_tests, "collect", lambda marked, log: found[marked])

    def run_tests(tests: list[str], deadline: float, log: steps.Log) -> cuda_tests.Result:
        return cuda_tests.Result(dict.fromkeys(tests, outcome), 1.0)

    monkeypatch.setattr(check.cuda_tests, "run", run_tests)
    run = check.Check(tmp_path, "90", 132)
    return run.run(built=built), calls, [*run.outcomes, *run.sanitized]


def test_all_steps_are_run_for_the_gpu_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, calls, outcomes = run_check(tmp_path, monkeypatch, failing=set())
    assert good
    assert calls.environments["build"]["CUDAARCHS"] == "90"
    assert set(GPU) <= set(calls.commands)
    assert calls.commands["racecheck"][:3] == ["compute-sanitizer", "--tool", "racecheck"]
    assert {outcome.status for outcome in outcomes} == {"passed"}
    order = list(calls.commands)
    assert order[:4] == ["environment", "build", "kernels", "extension"]
    assert set(order[4:15]) == set(check.SMOKE)
    assert order.index("tuner's kernels") < order.index("gpu.micro_batch")
    assert calls.commands["tuner's kernels"][-2:] == ["90", "132"]
    assert set(order[-4:]) == {name for name, *_ in check.SANITIZERS}
    assert sum(check.SHARES.values()) <= 480 and check.SHARES["smoke"] < 60
    assert len(["gpu_check.log", *GPU, "the tuner's table"]) <= 8
    for printed in (capsys.readouterr().out, (tmp_path / "gpu_check.log").read_text()):
        assert "a.py: 1 passed" in printed and "gpu.micro_batch            passed" in printed
        before, sanitized = printed.split("compute-sanitizer (fails nothing):\n")
        assert "racecheck" in sanitized and "racecheck" not in before.partition("summary")[2]


def test_tests_that_start_processes_run_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()
    running, most = {"a": 0, "s": 0}, {"a": 0, "s": 0}
    found = {
        cuda_tests.SHARING: [[f"s{i}.py::t"] for i in range(6)],
        cuda_tests.ALONE: [[f"a{i}.py::t"] for i in range(6)],
    }

    def run_tests(tests: list[str], deadline: float, log: steps.Log) -> cuda_tests.Result:
        kind = tests[0][0]
        with lock:
            running[kind] += 1
            most[kind] = max(most[kind], running[kind])
        time.sleep(0.1)
        with lock:
            running[kind] -= 1
        return cuda_tests.Result(dict.fromkeys(tests, "passed"), 1.0)

    monkeypatch.setattr(check, "run_step", Calls(set()))
    monkeypatch.setattr(check.cuda_tests, "collect", lambda marked, log: found[marked])
    monkeypatch.setattr(check.cuda_tests, "run", run_tests)
    run = check.Check(tmp_path, "90", 132)
    run.tests()
    assert len(run.tested) == 12 and most["a"] == 1 and most["s"] > 1


@pytest.mark.parametrize("failing", ["gpu.micro_batch", "build", "environment", "copy"])
def test_a_failing_step_is_reported_and_does_not_stop_others(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, calls, outcomes = run_check(tmp_path, monkeypatch, failing={failing})
    assert not good
    assert {GPU[-1], *(name for name, *_ in check.SANITIZERS)} <= set(calls.commands)
    step = "smoke" if failing in check.SMOKE else failing
    assert [outcome.name for outcome in outcomes if outcome.status == "failed"] == [step]


@pytest.mark.parametrize(
    ("outcome", "status", "note"),
    [
        ("failed", "failed", "1 tests, 1 failed, 0 skipped, 0 not run for lack of time"),
        # Skipping all tests is a failure, as there is a GPU.
        ("skipped", "failed", "1 tests, 0 failed, 1 skipped, 0 not run for lack of time"),
        ("not run", "not run", "1 tests, 0 failed, 0 skipped, 1 not run for lack of time"),
    ],
)
def test_tests_that_do_not_pass_are_reported_and_stop_no_benchmark(
    outcome: str, status: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, calls, outcomes = run_check(tmp_path, monkeypatch, failing=set(), outcome=outcome)
    assert good == (status == "not run") and GPU[-1] in calls.commands
    (tests,) = (found for found in outcomes if found.name == "tests")
    assert (tests.status, tests.note) == (status, note)


def test_what_sanitizers_find_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, calls, outcomes = run_check(tmp_path, monkeypatch, failing={"memcheck"})
    assert good and "racecheck" in calls.commands
    assert [outcome.name for outcome in outcomes if outcome.status == "failed"] == ["memcheck"]
    assert calls.commands["racecheck"][5:7] == ["--racecheck-detect-level", "error"]


def test_an_extension_built_before_needs_no_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, calls, _ = run_check(tmp_path, monkeypatch, failing=set(), built=True)
    assert good and "build" not in calls.commands and "gpu.pipe" in calls.commands


def test_without_an_extension_nothing_else_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, calls, _ = run_check(tmp_path, monkeypatch, failing={"build", "extension"})
    assert not good and set(calls.commands) == {"environment", "build", "extension"}


@pytest.mark.timeout(540)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_reports_every_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(os.getcwd())  # Restores the folder, which main() changes.
    begin = time.monotonic()
    check.main(["--dry-run", "--built"])
    assert time.monotonic() - begin < 480
    summary = capfd.readouterr().out.partition("==== summary")[2]
    for step in set(check.SHARES) - {"build", "kernels", "sanitizers"}:
        assert re.search(
            rf"^{re.escape(step)} +(passed|skipped|timed out|failed) ", summary, re.MULTILINE
        ), step
    assert "not run for lack of time: nothing" in summary


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_reports_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(os.getcwd())  # Restores the folder, which main() changes.
    assert check.main([]) == 1
    assert "sees no CUDA GPU" in capsys.readouterr().err
