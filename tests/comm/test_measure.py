"""What ``pipekernels tune`` measures, limits of ``algorithm="auto"`` and links between GPUs: their
files, agreement of the ranks, the measurements."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_processes
from torch import Tensor

from pipekernels import Communicator, cli
from pipekernels.comm import all_reduce_limits, links, measure
from pipekernels.comm.all_reduce_limits import Limits
from pipekernels.comm.links import LinkModel

DATE = "2026-01-31 12:00 UTC"
GPU = "Some GPU (R) 80GB"
LINK = LinkModel(4e-6, 1 / 340e9, 1 / 25e9)
REMEDY = "write it anew with `pipekernels tune`"


def limits_used(communicators: list[Communicator]) -> list[int]:
    return [each._cpu_backend.core.one_shot_bytes for each in communicators]


# ---- the files -----------------------------------------------------------------------------------


def test_saving_and_loading(cache: Path) -> None:
    measured = Limits({2: 4096, 8: 16384}, DATE)
    path = all_reduce_limits.save(Limits({2: 1}, DATE))
    assert all_reduce_limits.save(measured) == path == all_reduce_limits.path()
    assert all_reduce_limits.load() == measured
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]


def test_saving_links_adds_to_the_known_ones(cache: Path) -> None:
    assert links.for_gpu(GPU, 2) is None
    file = links.save(GPU, {2: LINK})
    assert file == cache / "pipekernels" / "links-some-gpu-r-80gb.json"
    other = LINK._replace(alpha=1e-5)
    links.save(GPU, {8: other})
    assert (links.for_gpu(GPU, 2), links.for_gpu(GPU, 8)) == (LINK, other)
    assert links.for_gpu(GPU, 4) is None and links.for_gpu("another", 2) is None


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


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"links": None},
        {"links": [{"ranks": 2}]},
        {"links": [{"ranks": 1, **LINK._asdict()}]},
        {"links": [{"ranks": "2", **LINK._asdict()}]},
        {"links": [{"ranks": 2, **LINK._replace(alpha=-1e-6)._asdict()}]},
        {"links": [{"ranks": 2, **LINK._replace(beta=1.0)._asdict()}]},
        {"links": [{"ranks": 2, **LINK._replace(beta=float("nan"))._asdict()}]},
    ],
)
def test_a_bad_file_of_links_is_ignored_with_a_warning(cache: Path, change: dict[str, Any]) -> None:
    file = links.save(GPU, {2: LINK})
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.warns(RuntimeWarning, match=REMEDY):
        assert links.for_gpu(GPU, 2) is None


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # It takes no space.


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
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "0\n"
    assert f"{path} is not used" in result.stderr


def test_an_unmeasured_world_size_takes_the_limit_of_the_next_smaller_one() -> None:
    limits = Limits({2: 1, 4: 2, 16: 3}, DATE)
    taken = {size: limits.limit(size) for size in (1, 2, 3, 4, 15, 16, 1000)}
    assert taken == {1: 1, 2: 1, 3: 1, 4: 2, 15: 2, 16: 3, 1000: 3}


# ---- agreement -----------------------------------------------------------------------------------


def test_threads_use_the_measured_limits(cache: Path) -> None:
    all_reduce_limits.save(Limits({2: 5000, 3: 7000}, DATE))
    assert limits_used(Communicator.threads(2)) == [5000] * 2
    assert limits_used(Communicator.threads(3)) == [7000] * 3


def join_with_own_file(first: Communicator, folder: str) -> int:
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{first.rank}"
    if first.rank != 1:  # Rank 1 has no file.
        all_reduce_limits.save(Limits({2: 1000 << 2 * first.rank}, DATE))
    with Communicator.from_process_group(timeout=20) as communicator:
        for bytes_ in (500, 2000, 10_000, 100_000):
            ones = torch.ones(bytes_ // 4)
            assert torch.equal(communicator.all_reduce(ones), torch.full_like(ones, 3))
        return limits_used([communicator])[0]


@pytest.mark.processes
def test_ranks_with_different_files_agree(tmp_path: Path) -> None:
    assert run_processes(3, join_with_own_file, str(tmp_path)) == [1000, 1000, 1000]


# ---- measuring limits ----------------------------------------------------------------------------


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
    result = subprocess.run(
        [sys.executable, "-m", "pipekernels", "tune", "--quick"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    measured = all_reduce_limits.load()
    assert measured is not None
    assert list(measured.one_shot_bytes) == measure.world_sizes(len(os.sched_getaffinity(0)))
    assert set(measured.one_shot_bytes.values()) <= set(measure.SIZES)
    for world_size, limit in measured.one_shot_bytes.items():
        assert f"{world_size} ranks: one_shot up to {limit} bytes" in result.stdout
    assert str(all_reduce_limits.path()) in result.stdout
    assert f"measured on {measured.date} ({all_reduce_limits.path()})" in cli.info()


# ---- measuring links, on a pretended clock -------------------------------------------------------


class Clock:
    """A communicator whose reductions take as long as ``link`` says, on a clock of its own."""

    def __init__(self, ranks: int, link: LinkModel, noise: float = 0.0) -> None:
        self.world_size = ranks
        self.blocks: list[int] = []
        self._link, self._noise, self._now = link, noise, 0.0
        self._random = random.Random(ranks)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def barrier(self) -> None:
        self._now += 1.0  # Counts only if it is timed.

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        assert op == "max"
        return tensor

    def all_reduce_when_ready(
        self, tensor: Tensor, ready: Tensor, target: int, block_rows: int, *, op: str, blocks: int
    ) -> Tensor:
        assert ready.numel() * block_rows >= len(tensor) and ready.min() >= target
        alpha, beta, block_beta = self._link
        n = self.world_size
        volume = 2 * (n - 1) / n * tensor.numel() * tensor.itemsize
        taken = 2 * alpha + volume * max(beta, block_beta / blocks)
        self._now += taken * (1 + self._noise * self._random.expovariate(1.0))
        self.blocks.append(blocks)
        return tensor

    def seconds(self, call: Callable[[], object]) -> float:
        begin = self._now
        call()
        return self._now - begin


def measured_by(clock: Any, **options: Any) -> LinkModel:
    options = {"seconds": clock.seconds} | options
    return measure.measure_link(clock, torch.device("cpu"), **options)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("link", [LINK, LinkModel(2e-5, 1 / 20e9, 1 / 20e9)])
def test_measuring_recovers_the_model(ranks: int, link: LinkModel) -> None:
    clock = Clock(ranks, link)
    assert measured_by(clock) == pytest.approx(link, rel=1e-3)
    assert set(clock.blocks) == {1, 2, 4, 8, 16, 32, 64}


def test_noise_is_left_out_or_refused() -> None:
    clock = Clock(4, LINK, noise=0.02)
    assert measured_by(clock) == pytest.approx(LINK, rel=0.05)
    samples = iter([1.0] + [0.5] * 7)  # The smallest tensor takes longest.
    with pytest.raises(ValueError, match="too noisy"):
        measured_by(clock, seconds=lambda call: next(samples), rounds=1)
    clock.world_size = 1
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        measured_by(clock)


def test_tune_measures_several_numbers_of_ranks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Everyone(contextlib.nullcontext["Everyone"]):
        def __init__(self, rank: int, sizes: list[int]) -> None:
            super().__init__(self)
            self.rank, self.sizes = rank, sizes
            self.world_size = 0

        def join(self, *arguments: object, **options: object) -> Everyone:
            return self

        def split(self, color: int | None) -> Everyone | None:
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

    def link_of(some: Everyone) -> LinkModel:
        return LINK._replace(alpha=some.world_size * 1e-6)

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    monkeypatch.setattr(measure, "measure_link", link_of)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert measure.tune_links() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    report = "\n".join(measure.tune_links())
    assert "6 ranks: 6.0 us, 340 GB/s, 25.0 GB/s per thread block" in report
    assert {ranks: link.alpha for ranks, link in links.load(GPU).items()} == pytest.approx(
        {2: 2e-6, 4: 4e-6, 6: 6e-6}
    )

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("GPU 0 cannot access GPU 1 directly")

    monkeypatch.setattr(torch.multiprocessing, "start_processes", fail)
    assert measure.tune_links() == [
        "links between GPUs were not measured: GPU 0 cannot access GPU 1 directly"
    ]


def test_every_rank_measures_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)

    def stop(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert used == [device]
        raise KeyboardInterrupt

    comm: Any = SimpleNamespace(rank=3, world_size=4, empty=stop)
    with pytest.raises(KeyboardInterrupt):
        measure.measure_link(comm)
    assert used == [torch.device("cuda", 3)]
