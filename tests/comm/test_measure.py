"""What ``pipekernels tune`` measures for ``algorithm="auto"``: its file, the ranks' agreement, the
measurements."""

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.programs import python
from support.ranks import on_ranks

from pipekernels import Communicator, cli
from pipekernels.comm import all_reduce_limits, measure
from pipekernels.comm.all_reduce_limits import Limits

DATE = "2026-01-31 12:00 UTC"
REMEDY = "write it anew with `pipekernels tune`"


def limits_used(communicators: list[Communicator]) -> list[int]:
    return [each._cpu_backend.core.one_shot_bytes for each in communicators]


def test_saving_and_loading(cache: Path) -> None:
    measured = Limits({2: 4096, 8: 16384}, DATE)
    path = all_reduce_limits.save(Limits({2: 1}, DATE))
    assert all_reduce_limits.save(measured) == path == all_reduce_limits.path()
    assert all_reduce_limits.load() == measured
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]


def test_the_file_names_the_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = all_reduce_limits.path()
    assert path.is_relative_to(cache) and path.stem.endswith(f"-{os.cpu_count()}c")
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert all_reduce_limits.path() != path
    monkeypatch.setattr(all_reduce_limits, "cpu_model", lambda: "Some (R) CPU / 3")
    assert all_reduce_limits.path().name == "all-reduce-some-r-cpu-3-1000c.json"


def test_the_processor_is_named_with_family_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nvendor_id\t: X\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: A: B \n"
    monkeypatch.setattr(Path, "read_text", lambda self: f"{text}flags\t:\n\n{text}")
    assert all_reduce_limits.cpu_model() == "A: B (family 25, model 17)"
    monkeypatch.setattr(Path, "read_text", lambda self: "model name\t: C\n")
    assert all_reduce_limits.cpu_model() == "C"


def test_a_failed_save_leaves_no_file_behind(cache: Path) -> None:
    path = all_reduce_limits.path()
    path.mkdir(parents=True)  # A file cannot replace a folder.
    with pytest.raises(OSError, match="cannot be written"):
        all_reduce_limits.save(Limits({2: 4096}, DATE))
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("folder", [None, "", "relative"])
def test_without_a_valid_xdg_cache_home_the_default_is_used(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if folder is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert all_reduce_limits.path().parent == tmp_path / ".cache" / "pipekernels"


@pytest.mark.parametrize("folder", ["new", "file"])
def test_a_missing_file_does_not_warn(
    folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all_reduce_limits.load() is None
        assert all_reduce_limits.one_shot_bytes(2) == 0


GOOD = {"format": all_reduce_limits.FORMAT, "date": DATE, "one_shot_bytes": {"2": 4096}}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "\0\xff", "[]", "[" * 200_000, "{}",
        *(json.dumps(GOOD | {"format": other}) for other in (all_reduce_limits.FORMAT + 1, "1")),
        json.dumps(GOOD | {"date": 3}),
        *(
            json.dumps(GOOD | {"one_shot_bytes": limits})
            for limits in (
                {}, [4096], {"two": 4096}, {"-3": 4096}, {"0": 4096}, {" 2": 4096}, {"1_0": 4096},
                {"\u0663": 4096},  # A three in Arabic digits.
                {"2": 0}, {"2": 2**70}, {"2": 0.5}, {"2": True},
            )
        ),
    ],
)  # fmt: skip
def test_a_bad_file_is_ignored_with_a_warning_that_names_the_remedy(cache: Path, text: str) -> None:
    path = all_reduce_limits.save(Limits({2: 4096}, DATE))
    assert json.loads(path.read_text()) == GOOD
    path.write_bytes(text.encode("latin-1"))
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(path))}.*{REMEDY}"):
        assert all_reduce_limits.one_shot_bytes(2) == 0
    with pytest.warns(RuntimeWarning):
        assert limits_used(Communicator.threads(2)) == [0, 0]
    assert f"! {path} is not used" in cli.info()


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # It takes no space.


@pytest.mark.processes
@pytest.mark.parametrize("make", [os.mkfifo, make_endless, make_huge, Path.mkdir])
def test_special_and_huge_files_are_ignored(cache: Path, make: Callable[[Path], None]) -> None:
    path = all_reduce_limits.path()
    path.parent.mkdir(parents=True)
    make(path)
    script = (
        "import warnings; from pipekernels import Communicator; warnings.simplefilter('always'); "
        "print(Communicator.threads(2)[0]._cpu_backend.core.one_shot_bytes)"
    )
    result = python("-c", script)
    assert result.stdout == "0\n"
    assert f"{path} is not used" in result.stderr


def test_an_unmeasured_world_size_takes_the_limit_of_the_next_smaller_one() -> None:
    limits = Limits({2: 1, 4: 2, 16: 3}, DATE)
    taken = {size: limits.limit(size) for size in (1, 2, 3, 4, 15, 16, 1000)}
    assert taken == {1: 1, 2: 1, 3: 1, 4: 2, 15: 2, 16: 3, 1000: 3}


def test_threads_use_the_measured_limits(cache: Path) -> None:
    all_reduce_limits.save(Limits({2: 5000, 3: 7000}, DATE))
    assert limits_used(Communicator.threads(2)) == [5000] * 2
    assert limits_used(Communicator.threads(3)) == [7000] * 3


@on_ranks(3)
def test_ranks_with_different_files_agree(first: Communicator, tmp_path: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / str(first.rank))
    if first.rank != 1:  # Rank 1 has no file.
        all_reduce_limits.save(Limits({2: 1000 << 2 * first.rank}, DATE))
    with Communicator.from_process_group(timeout=20) as communicator:
        for bytes_ in (500, 2000, 10_000, 100_000):
            ones = torch.ones(bytes_ // 4)
            assert torch.equal(communicator.all_reduce(ones), torch.full_like(ones, 3))
        assert limits_used([communicator]) == [1000]


def times(one_shot: float, two_shot: float, growth: dict[str, float]) -> measure.Times:
    """Times of calls that take a fixed time, plus ``growth`` (for one_shot: 3) per byte."""
    fixed = {"one_shot": one_shot, "two_shot": two_shot}
    per_byte = {"one_shot": dict.fromkeys(measure.KINDS, 3.0), "two_shot": growth}
    return {
        (algorithm, kind, size): fixed[algorithm] + per_byte[algorithm][kind] * size
        for algorithm in measure.ALGORITHMS
        for kind in measure.KINDS
        for size in measure.SIZES
    }


def test_the_limit_is_where_the_lines_cross() -> None:
    growth = {"ordinary": 2.0, "symmetric": 2.0}
    assert measure.best_limit(times(1000.0, 1000.0 + 3000, growth)) == 2048  # They cross at 3000.
    assert measure.best_limit(times(1000.0, 1000.0 + 4097, growth)) == 4096
    assert measure.best_limit(times(1.0, 1e9, growth)) == measure.SIZES[-1]
    assert measure.best_limit(times(1e9, 1.0, growth)) == measure.SIZES[0]


def test_the_limit_serves_both_kinds_of_tensors() -> None:
    alone = [
        measure.best_limit(times(1000.0, 9000.0, dict.fromkeys(measure.KINDS, slope)))
        for slope in (0.1, 2.5)
    ]
    both = measure.best_limit(times(1000.0, 9000.0, {"ordinary": 2.5, "symmetric": 0.1}))
    assert alone[0] < both < alone[1]


def test_world_sizes_fit_the_machine() -> None:
    assert all(measure.world_sizes(cores) == [2, 4, 8] for cores in (1, 8, 15))
    assert measure.world_sizes(16) == [2, 4, 8, 16]
    assert measure.world_sizes(96) == [2, 4, 8, 16, 32, 64]


@pytest.mark.full
@pytest.mark.processes
def test_tune_saves_the_limits_that_info_reports(cache: Path) -> None:
    assert "built-in limits" in cli.info()
    result = python("-m", "pipekernels", "tune", "--quick")
    measured = all_reduce_limits.load()
    assert list(measured.one_shot_bytes) == measure.world_sizes(len(os.sched_getaffinity(0)))
    assert set(measured.one_shot_bytes.values()) <= set(measure.SIZES)
    for world_size, limit in measured.one_shot_bytes.items():
        assert f"{world_size} ranks: one_shot up to {limit} bytes" in result.stdout
    assert str(all_reduce_limits.path()) in result.stdout
    assert f"measured on {measured.date} ({all_reduce_limits.path()})" in cli.info()


def test_every_number_of_ranks_measures_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the ranks are pretended."""

    class Everyone(contextlib.nullcontext["Everyone"]):
        def __init__(self, rank: int, sizes: list[int]) -> None:
            super().__init__(self)
            self.rank, self.sizes = rank, sizes
            self.world_size = 0

        def join(self, *arguments: object, **options: object) -> "Everyone":
            return self

        def split(self, color: int | None) -> "Everyone | None":
            self.world_size = self.sizes.pop(0)
            return self if color == 0 else None

        def barrier(self) -> None:
            pass

    def start(body: Callable[..., None], arguments: Any, nprocs: int, **options: Any) -> Any:
        for rank in reversed(range(nprocs)):
            everyone = Everyone(rank, list(arguments[2]))
            monkeypatch.setattr(measure.Communicator, "from_store", everyone.join)
            body(rank, *arguments)
        return SimpleNamespace(join=lambda timeout: True)

    def measure_one(some: Any) -> int:
        measured.append((some.rank, some.world_size))
        return int(some.world_size)

    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    assert measure.by_world_size(measure_one, [2, 3]) == {2: 2, 3: 3}
    assert sorted(measured) == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
