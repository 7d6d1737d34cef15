"""The size limits of ``algorithm="auto"``: their file, agreement of the ranks, measurement."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranks import run_processes

from pipekernels import Communicator, cli
from pipekernels.comm import limits as tuning
from pipekernels.comm import tuning as tuner
from pipekernels.comm.limits import Tuning

DATE = "2026-01-31 12:00 UTC"


# ---- the file ----


def test_saving_and_loading(cache: Path) -> None:
    measured = Tuning({2: 4096, 8: 16384}, DATE)
    path = tuning.save(Tuning({2: 1}, DATE))
    assert tuning.save(measured) == path == tuning.path()
    assert tuning.load() == measured
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]


def test_the_file_names_the_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning.path()
    assert path.is_relative_to(cache) and path.stem.endswith(f"-{os.cpu_count()}c")
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert tuning.path() != path
    monkeypatch.setattr(tuning, "cpu_model", lambda: "Some (R) CPU / 3")
    assert tuning.path().name == "all-reduce-some-r-cpu-3-1000c.json"


def test_a_failed_save_leaves_no_file_behind(cache: Path) -> None:
    tuning.path().mkdir(parents=True)  # A file cannot replace a folder.
    with pytest.raises(OSError, match="cannot be written"):
        tuning.save(Tuning({2: 4096}, DATE))
    assert list(tuning.path().parent.iterdir()) == [tuning.path()]


@pytest.mark.parametrize("folder", [None, "", "relative"])
def test_without_a_valid_xdg_cache_home_the_default_is_used(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if folder is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert tuning.path().parent == tmp_path / ".cache" / "pipekernels"


@pytest.mark.parametrize("folder", ["new", "file"])
def test_a_missing_file_does_not_warn(
    folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.load() is None
        assert tuning.one_shot_bytes(2) == 0


GOOD = {"format": tuning.FORMAT, "date": DATE, "one_shot_bytes": {"2": 4096}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\0\xff",
        "[]",
        "[" * 200_000,
        "{}",
        json.dumps(GOOD | {"format": tuning.FORMAT + 1}),
        json.dumps(GOOD | {"format": "1"}),
        json.dumps(GOOD | {"date": 3}),
        json.dumps(GOOD | {"one_shot_bytes": {}}),
        json.dumps(GOOD | {"one_shot_bytes": [4096]}),
        json.dumps(GOOD | {"one_shot_bytes": {"two": 4096}}),
        json.dumps(GOOD | {"one_shot_bytes": {"-3": 4096}}),
        json.dumps(GOOD | {"one_shot_bytes": {"0": 4096}}),
        json.dumps(GOOD | {"one_shot_bytes": {" 2": 4096}}),
        json.dumps(GOOD | {"one_shot_bytes": {"1_0": 4096}}),
        json.dumps(GOOD | {"one_shot_bytes": {"\u0663": 4096}}),  # A three in Arabic digits.
        json.dumps(GOOD | {"one_shot_bytes": {"2": 0}}),
        json.dumps(GOOD | {"one_shot_bytes": {"2": 2**70}}),
        json.dumps(GOOD | {"one_shot_bytes": {"2": 0.5}}),
        json.dumps(GOOD | {"one_shot_bytes": {"2": True}}),
    ],
)
def test_a_bad_file_is_ignored_with_a_warning_that_names_the_remedy(cache: Path, text: str) -> None:
    path = tuning.save(Tuning({2: 4096}, DATE))
    assert json.loads(path.read_text()) == GOOD
    path.write_bytes(text.encode("latin-1"))
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(path))}.*`pipekernels tune`"):
        assert tuning.one_shot_bytes(2) == 0
    with pytest.warns(RuntimeWarning):
        communicators = Communicator.threads(2)
    assert [communicator._cpu_backend.core.one_shot_bytes for communicator in communicators] == [
        0,
        0,
    ]
    assert f"! {path} is not used" in cli.info()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # It takes no space.


@pytest.mark.processes
@pytest.mark.parametrize("make", [make_pipe, make_endless, make_huge, Path.mkdir])
def test_special_and_huge_files_are_ignored(cache: Path, make: Callable[[Path], None]) -> None:
    tuning.path().parent.mkdir(parents=True)
    make(tuning.path())
    script = (
        "import warnings; from pipekernels import Communicator; warnings.simplefilter('always'); "
        "print(Communicator.threads(2)[0]._cpu_backend.core.one_shot_bytes)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "0\n"
    assert f"{tuning.path()} is not used" in result.stderr


def test_an_unmeasured_world_size_takes_the_limit_of_the_next_smaller_one() -> None:
    limits = {2: 1, 4: 2, 16: 3}
    taken = {size: Tuning(limits, DATE).limit(size) for size in (1, 2, 3, 4, 15, 16, 1000)}
    assert taken == {1: 1, 2: 1, 3: 1, 4: 2, 15: 2, 16: 3, 1000: 3}


# ---- agreement ----


def test_threads_use_the_measured_limits(cache: Path) -> None:
    tuning.save(Tuning({2: 5000, 3: 7000}, DATE))
    limits = [
        c._cpu_backend.core.one_shot_bytes for size in (2, 3) for c in Communicator.threads(size)
    ]
    assert limits == [5000] * 2 + [7000] * 3


def join_with_own_file(first: Communicator, folder: str) -> int:
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{first.rank}"
    if first.rank != 1:  # Rank 1 has no file.
        tuning.save(Tuning({2: 1000 << 2 * first.rank}, DATE))
    with Communicator.from_process_group(timeout=20) as communicator:
        for bytes_ in (500, 2000, 10_000, 100_000):
            ones = torch.ones(bytes_ // 4)
            assert torch.equal(communicator.all_reduce(ones), torch.full_like(ones, 3))
        return communicator._cpu_backend.core.one_shot_bytes


@pytest.mark.processes
def test_ranks_with_different_files_agree(tmp_path: Path) -> None:
    limits = run_processes(3, join_with_own_file, str(tmp_path))
    assert limits == [1000, 1000, 1000]


# ---- measuring ----


def times(one_shot: float, two_shot: float, growth: dict[str, float]) -> tuner.Times:
    """Times of calls that take a fixed time, plus ``growth`` (for one_shot: 3) per byte."""
    fixed = {"one_shot": one_shot, "two_shot": two_shot}
    per_byte = {"one_shot": dict.fromkeys(tuner.KINDS, 3.0), "two_shot": growth}
    return {
        (algorithm, kind, size): fixed[algorithm] + per_byte[algorithm][kind] * size
        for algorithm in tuner.ALGORITHMS
        for kind in tuner.KINDS
        for size in tuner.SIZES
    }


def test_the_limit_is_where_the_lines_cross() -> None:
    growth = {"ordinary": 2.0, "symmetric": 2.0}
    assert tuner.best_limit(times(1000.0, 1000.0 + 3000, growth)) == 2048  # They cross at 3000.
    assert tuner.best_limit(times(1000.0, 1000.0 + 4097, growth)) == 4096
    assert tuner.best_limit(times(1.0, 1e9, growth)) == tuner.SIZES[-1]
    assert tuner.best_limit(times(1e9, 1.0, growth)) == tuner.SIZES[0]


def test_the_limit_serves_both_kinds_of_tensors() -> None:
    alone = [
        tuner.best_limit(times(1000.0, 9000.0, dict.fromkeys(tuner.KINDS, slope)))
        for slope in (0.1, 2.5)
    ]
    both = tuner.best_limit(times(1000.0, 9000.0, {"ordinary": 2.5, "symmetric": 0.1}))
    assert alone[0] < both < alone[1]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        *((cores, [2, 4, 8]) for cores in (1, 8, 15)),
        (16, [2, 4, 8, 16]),
        (96, [2, 4, 8, 16, 32, 64]),
    ],
)
def test_world_sizes_fit_the_machine(cores: int, expected: list[int]) -> None:
    assert tuner.world_sizes(cores) == expected


@pytest.mark.full
@pytest.mark.processes
def test_tune_saves_the_limits_that_info_reports(cache: Path) -> None:
    assert "built-in limits" in cli.info()
    result = subprocess.run(
        [sys.executable, "-m", "pipekernels", "tune", "--quick"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    measured = tuning.load()
    assert measured is not None
    assert list(measured.one_shot_bytes) == tuner.world_sizes(len(os.sched_getaffinity(0)))
    assert set(measured.one_shot_bytes.values()) <= set(tuner.SIZES)
    for world_size, limit in measured.one_shot_bytes.items():
        assert f"{world_size} ranks: one_shot up to {limit} bytes" in result.stdout
    assert str(tuning.path()) in result.stdout
    assert f"measured on {measured.date} ({tuning.path()})" in cli.info()
