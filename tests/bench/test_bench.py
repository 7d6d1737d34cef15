"""The benchmarks' harness: ranks, turns, measurements, and checks of values."""

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import collectives, harness, processes, records, tensor_parallel
from bench.peers import groups
from bench.peers.rank import Rank, Start, contents, expected
from bench.peers.systems import STORAGE, Candidate

pytestmark = pytest.mark.project


class FakeSystem:
    """Sums all ranks' tensors, except the last ``missing`` elements."""

    version = "1"

    def __init__(self, rank: int, ranks: int, missing: int = 0, name: str = "fake") -> None:
        self.rank, self._ranks = rank, ranks
        self._missing, self._name = missing, name

    def candidates(self, count: int, dtype: str) -> dict[str, Candidate]:
        buffer = np.empty(count, STORAGE[dtype])
        summed = count - self._missing

        def call() -> None:
            buffer[:summed] = expected(self._ranks, count, dtype)[:summed]

        return {self._name: Candidate(buffer, call)}

    def close(self) -> None:
        pass


def start_file(folder: Path, ranks: int) -> Path:
    path = folder / "start"
    path.write_bytes(bytes(Start.bytes(ranks)))
    return path


def lone_rank(folder: Path, ranks: int = 3, **system: Any) -> Rank:
    """One that sums the tensors of ``ranks`` ranks, and starts alone."""
    return Rank(FakeSystem(0, ranks, **system), ranks, Start(start_file(folder, 1), 0, 1))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_expected_sum_equals_the_sum_of_the_contents(dtype: str, ranks: int) -> None:
    def values(array: np.ndarray) -> torch.Tensor:
        if dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).double()
        return torch.from_numpy(array).double()

    inputs = [values(contents(rank, 3000, dtype)) for rank in range(ranks)]
    assert torch.equal(values(expected(ranks, 3000, dtype)), sum(inputs))
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(inputs))


@pytest.mark.full
def test_wrong_elements_are_counted(tmp_path: Path) -> None:
    for missing in (0, 7):
        rank = lone_rank(tmp_path, missing=missing)
        assert rank.prepare(4000, "float32") == ["fake"]
        assert rank.check("fake") == missing


@pytest.mark.full
def test_every_measurement_gives_one_time_per_call(tmp_path: Path) -> None:
    rank = lone_rank(tmp_path, 1)
    rank.prepare(1024, "float32")
    aligned, crowded = rank.measure("fake", 2, 5), rank.measure("fake", 0, 6, together=False)
    assert (len(aligned), len(crowded)) == (5, 6)
    assert min(*aligned, *crowded, rank.measure_back_to_back("fake", 4)) > 0


@pytest.mark.full
def test_ranks_start_together_after_the_last_has_come(tmp_path: Path) -> None:
    path = start_file(tmp_path, 3)
    turns: list[int] = []

    def run(rank: int) -> list[int]:
        start, begins = Start(path, rank, 3), []
        for turn in range(4):
            turns.append(turn)
            begins.append(start.together())
            assert turns.count(turn) == 3
        return begins

    with ThreadPoolExecutor(3) as ranks:
        first, second, third = ranks.map(run, range(3))
    assert first == second == third == sorted(set(first)) and len(first) == 4


class LocalGroup:
    """A group of one rank, in this process."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def call(self, method: str, **arguments: Any) -> list[Any]:
        return [getattr(self._rank, method)(**arguments)]


@pytest.mark.full
def test_rows_have_size_dtype_bandwidth_and_wrong_elements(tmp_path: Path) -> None:
    session: Any = {"fake": (LocalGroup(lone_rank(tmp_path, missing=2)), "1.0")}
    cases = ["float32, 1024 bytes", "float32, 4096 bytes", "bfloat16, 1024 bytes"]
    measured = collectives.by_size(session, {case: ["fake"] for case in cases}, quick=True)
    rows = [row for case in measured for row in case.rows]
    found = [(row["type"], row["size"], row["count"], row["wrong"]) for row in rows]
    assert found == [  # Two elements are wrong, in checks before and after.
        ("float32", 1024, 256, 4),
        ("float32", 4096, 1024, 4),
        ("bfloat16", 1024, 512, 4),
    ]
    for row in rows:
        assert row["algbw"] == pytest.approx(row["size"] / row["median"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"])  # They are equal for two ranks.


@pytest.mark.full
def test_visits_to_a_size_are_spread_over_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "VISITS", 2)
    monkeypatch.setattr(collectives, "turn_for", lambda size: (1, 0, 3))
    seconds = iter(range(1, 13))
    monkeypatch.setattr(
        collectives, "slowest", lambda answers: [float(next(seconds)) for _ in answers[0]]
    )
    session: Any = {"fake": (LocalGroup(lone_rank(tmp_path, missing=2)), "1.0")}
    cases = ["float32, 1024 bytes", "float32, 4096 bytes"]
    measured = collectives.by_size(session, {case: ["fake"] for case in cases}, quick=False)
    small, large = (row for case in measured for row in case.rows)
    visited = re.findall(r"(\d+) bytes", capsys.readouterr().out)
    assert visited == ["1024", "4096", "1024", "4096"]
    assert (small["median"], small["min"], small["wrong"]) == (5.0, 1.0, 8)  # 1 to 3 and 7 to 9 s.
    assert (large["median"], large["min"], large["wrong"]) == (8.0, 4.0, 8)


@pytest.mark.full
def test_crowded_ranks_make_as_many_calls_as_asked_for(tmp_path: Path) -> None:
    rank = lone_rank(tmp_path, missing=2, name="ordinary")
    session: Any = {"fake": (LocalGroup(rank), "1.0")}
    (row,) = collectives.crowded(session, quick=True).rows
    assert (row["candidate"], row["calls"], row["wrong"]) == ("ordinary", 100, 4)
    assert row["median"] <= row["p99"]


@pytest.fixture
def streaming(tmp_path: Path) -> Iterator[groups.Group]:
    """A group of two ranks; this system needs only NumPy."""
    with contextlib.closing(groups.Group("streaming", 2, tmp_path)) as group:
        assert group.wait_until_ready() == np.__version__
        yield group


@pytest.mark.full
def test_all_ranks_of_a_group_answer(streaming: groups.Group) -> None:
    assert streaming.call("prepare", size=4096, dtype="float32") == [["copy", "in place"]] * 2
    answers = streaming.call("measure", candidate="copy", warmup=1, calls=3)
    assert [len(times) for times in answers] == [3, 3]
    assert [answer["rank"] for answer in streaming.call("describe")] == [0, 1]


@pytest.mark.full
def test_a_rank_that_dies_or_fails_is_an_error_that_names_the_system(
    streaming: groups.Group,
) -> None:
    with pytest.raises(groups.GroupError, match="(?s)streaming: .*KeyError: 'nonsense'"):
        streaming.call("check", candidate="nonsense")
    with pytest.raises(groups.GroupError, match="streaming: a rank has died"):
        streaming.call("describe")


@pytest.mark.full
def test_closing_ends_all_ranks_even_a_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "PATIENCE", 0.5)
    with contextlib.closing(groups.Group("streaming", 2, tmp_path)) as group:
        group.wait_until_ready()
        pids = [answer["pid"] for answer in group.call("describe")]
        os.kill(pids[1], signal.SIGSTOP)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.full
def test_a_session_leaves_out_systems_that_are_missing_or_do_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such library\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setitem(groups.PYTHONS, "broken", broken)
    monkeypatch.setitem(groups.PYTHONS, "absent", tmp_path / "absent")
    with groups.session(["absent", "broken", "streaming"], 2) as ready:
        assert list(ready) == ["streaming"]
        group, version = ready["streaming"]
        assert version == np.__version__
        assert group.call("prepare", size=64, dtype="bfloat16") == [["copy", "in place"]] * 2
    printed = capsys.readouterr().out
    assert "absent is not installed" in printed
    assert "broken: left out" in printed and "no such library" in printed


class FailingGroup(LocalGroup):
    """Fails in the given call."""

    def __init__(self, rank: Rank, system: str, fails_in: str) -> None:
        super().__init__(rank)
        self._system, self._fails_in = system, fails_in
        self.closed = False

    def call(self, method: str, **arguments: Any) -> list[Any]:
        if method == self._fails_in:
            raise groups.GroupError(self._system, "a rank has died or hangs")
        return super().call(method, **arguments)

    def close(self) -> None:
        self.closed = True


@pytest.mark.full
def test_a_peer_that_fails_is_left_out_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = LocalGroup(lone_rank(tmp_path, name="ordinary"))
    peer = FailingGroup(lone_rank(tmp_path, name="MPICH"), "MPICH", "measure")
    session: Any = {"pipekernels": (ours, "1.0"), "MPICH": (peer, "5.0")}
    cases = ["float32, 1024 bytes", "bfloat16, 1024 bytes"]
    plan = {case: ["ordinary", "MPICH"] for case in cases}
    measured = collectives.by_size(session, plan, quick=True)
    assert [(case.case, list(case.samples)) for case in measured] == [
        ("float32, 1024 bytes", ["ordinary"]),
        ("bfloat16, 1024 bytes", ["ordinary"]),
    ]
    assert list(session) == ["pipekernels"] and peer.closed
    assert "MPICH: left out from here on" in capsys.readouterr().out


@pytest.mark.full
def test_a_failure_of_pipekernels_is_an_error(tmp_path: Path) -> None:
    rank = lone_rank(tmp_path, name="ordinary")
    session: Any = {"pipekernels": (FailingGroup(rank, "pipekernels", "check"), "1.0")}
    with pytest.raises(groups.GroupError, match="pipekernels: a rank has died or hangs"):
        collectives.by_size(session, {"float32, 1024 bytes": ["ordinary"]}, quick=True)


@pytest.mark.full
def test_a_session_without_pipekernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups.PYTHONS, "nonsense", groups.OURS)
    with (
        pytest.raises(groups.GroupError, match="KeyError: 'nonsense'"),
        groups.session(["nonsense"], 2),
    ):
        pass


@pytest.mark.full
def test_a_system_that_is_busy_while_it_waits_is_detected() -> None:
    def fake(seconds: float) -> Any:
        used = itertools.count(5.0, seconds)
        return SimpleNamespace(ranks=2, cpu_seconds=lambda: next(used))

    fakes = {"idle": fake(0.0), "spinning": fake(2.0), "ticking": fake(0.01)}
    assert groups.busy_while_idle(fakes) == ["spinning"]


@pytest.mark.full
def test_pipekernels_and_gloo_sum_correctly_in_both_dtypes() -> None:
    with groups.session(["pipekernels", "Gloo"], 2) as session:
        assert list(session) == ["pipekernels", "Gloo"]
        for dtype in collectives.DTYPES:
            calls = collectives.prepare(session, 1 << 16, dtype, collectives.SUMS + ["Gloo"])
            assert set(calls) == {*collectives.SUMS, "Gloo"}
            assert set(collectives.check(calls).values()) == {0}


def test_candidates_alternate_and_may_give_several_samples() -> None:
    order: list[str] = []

    def turn(name: str, found: Any) -> Any:
        order.append(name)
        return found

    turns = {"several": partial(turn, "several", [1.0, 2.0]), "one": partial(turn, "one", 3.0)}
    samples = harness.alternate(turns, warmup=1, rounds=2)
    assert samples == {"several": [1.0, 2.0] * 2, "one": [3.0] * 2}
    assert order == ["several", "one", "one", "several", "several", "one"]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("names", ["abcdef", "abcde"])
def test_each_candidate_follows_every_other_one_equally_often(names: str, calls: int) -> None:
    order: list[str] = []
    turns = {name: lambda name=name: order.append(name) for name in names}
    rounds = 2 * len(names) // calls
    for call in range(calls):
        harness.alternate(turns, warmup=0, rounds=rounds, start=call * rounds)
    by_round = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    assert all(sorted(each) == list(names) for each in by_round)
    neighbours = [pair for each in by_round for pair in itertools.pairwise(each)]
    assert sorted(neighbours) == sorted([*itertools.permutations(names, 2)] * 2)


def answer_at_once(rank: int, port: int, serve: Any, seconds: list[float]) -> None:
    serve(lambda: seconds[rank])


def fail(rank: int, port: int, serve: Any) -> None:
    raise ValueError("no such library")


@pytest.mark.full
def test_a_turn_of_processes_takes_as_long_as_the_slowest() -> None:
    with contextlib.closing(processes.Processes(2, answer_at_once, [1.0, 3.0])) as pair:
        assert [pair(), pair()] == [3.0, 3.0]


@pytest.mark.full
def test_a_process_that_ends_is_an_error_that_names_its_work(
    capfd: pytest.CaptureFixture[str],
) -> None:
    closing, message = contextlib.closing(processes.Processes(1, fail)), "of fail has ended"
    with closing as one, pytest.raises(RuntimeError, match=f"a process {message}"):
        one()
    assert "no such library" in capfd.readouterr().err


@pytest.mark.full
def test_tensor_parallel_layers_are_checked_before_they_are_timed() -> None:
    turns, threads = list[float](), torch.get_num_threads()
    for case in tensor_parallel.CASES:
        module = tensor_parallel.build()
        tensor_parallel.serve_steps(module, case, lambda turn: turns.append(turn()), threads)
        with torch.no_grad():
            module[2].weight[0] *= 1.01
        with pytest.raises(AssertionError):
            tensor_parallel.serve_steps(module, case, lambda turn: turns.append(turn()), threads)
    assert len(turns) == len(tensor_parallel.CASES) and min(turns) > 0


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    assert collectives.slowest([[1_000, 5_000], [3_000, 2_000]]) == pytest.approx([3e-6, 5e-6])


MEDIANS = {
    "ordinary": 20e-6, "ordinary one_shot": 40e-6, "ordinary two_shot": 16e-6,
    "ordinary ring": 30e-6, "symmetric": 10e-6, "symmetric one_shot": 40e-6,
    "symmetric two_shot": 10e-6, "symmetric ring": 30e-6, "Gloo": 900e-6, "MPICH": 50e-6,
    "copy": 8e-6, "in place": 6e-6,
}  # fmt: skip


def made_up_rows() -> list[collectives.Row]:
    figures = {"p10": 1e-6, "p90": 2e-6, "p99": 3e-6, "calls": 10, "algbw": 1.0, "busbw": 1.0}
    parts = [("sizes", size, dtype) for dtype in collectives.DTYPES for size in (1024, 4096)]
    parts += [("back to back", 1024, "float32"), ("crowded", 4096, "float32")]
    return [
        collectives.row(
            *(part, name, "1.0", size, dtype), median=median, wrong=3 * ("ring" in name), **figures
        )
        for part, size, dtype in parts
        for name, median in MEDIANS.items()
    ]


def test_tables_compare_with_the_best_peer_the_bound_and_the_best_algorithm() -> None:
    faster = [row | {"median": row["median"] / (2 if row["candidate"] == "symmetric" else 1)}
              for row in made_up_rows()]  # fmt: skip
    text = collectives.table(made_up_rows(), [faster])
    ours = "| 1024 | 256 | float32 | sum | {} | 1.00 | 1.00 | 0 | MPICH | 50.00 | {} | {} |"
    assert ours.format("20.00", "2.50", "30%") in text
    assert ours.format("10.00", "5.00", "60%") in text
    assert "Geometric mean of x best peer: 2.50; on all machines 2.50 to 2.50." in text
    assert "Geometric mean of x best peer: 5.00; on all machines 5.00 to 10.00." in text
    assert "| 4096 | bfloat16 | 20.00 | 40.00 | 16.00 | 30.00 | 3 |" in text
    assert "Peers: Gloo 1.0, MPICH 1.0" in text and "Open MPI" not in text


def test_the_plot_is_the_same_for_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        collectives.plot(made_up_rows(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_text().startswith("<?xml")


def test_without_git_the_environment_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*command: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(records.subprocess, "run", missing)
    monkeypatch.delenv("COMMIT", raising=False)
    assert records.commit() == "unknown"
    monkeypatch.setenv("COMMIT", "0123456789ab")
    assert records.commit() == "0123456789ab"
