"""Which products are overlapped with their all-reduce: measurements, their file, the choice."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels.gemm_cases import CONFIG, measured, pretend_gpu
from support.ranks import run_threads
from torch import Tensor

from pipekernels import Communicator, _log
from pipekernels.kernels.config import BLOCKS
from pipekernels.kernels.table import Shape
from pipekernels.local_ops.gemm_choice import Chosen, choose
from pipekernels.tensor_parallel import overlap
from pipekernels.tensor_parallel.overlap import tuning

GPU = "Some GPU"
CPU = torch.device("cpu")
SHAPE = Shape("bfloat16", "forward", 4096, 8192, 8192)
OTHER = SHAPE._replace(m=2048)
OVERLAPPED = Chosen(CONFIG, reducing_blocks=8)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Append to it to pretend that a graph is being captured."""
    found: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(found))
    return found


def product(rows: int = 4096, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    sizes = (rows, 8192), (8192, 8192), (rows, 8192)
    return tuple(torch.empty(size, dtype=dtype, device="meta") for size in sizes)


def test_auto_overlaps_the_products_that_were_measured_to_gain(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, measured(speedup=1.0, shape=SHAPE))
    assert choose(*product(), overlaps={OTHER: 8}) is None
    assert choose(*product(), overlaps={SHAPE: 8}) == OVERLAPPED
    assert choose(*product(3072), overlaps={SHAPE: 8}) == OVERLAPPED  # Of the same class.
    assert choose(*product(dtype=torch.float64), overlaps={SHAPE: 8}) is None
    pretend_gpu(monkeypatch, None)
    assert choose(*product(), overlaps={SHAPE: 8}) is None


def test_overlap_on_demand_needs_no_measurement(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, measured(shape=SHAPE))
    a = product()[0]
    chosen = overlap.always(choose(*product(), algorithm="triton"), a)
    assert chosen == Chosen(CONFIG, forced=True, reducing_blocks=overlap.REDUCING_BLOCKS)
    shared = overlap.always(Chosen(CONFIG._replace(split_k=2)), a)
    assert shared is not None and shared.config.split_k == 1
    assert shared.config.blocks == BLOCKS[90, "bfloat16"].full_tile[0]
    assert overlap.always(None, a) is None


@pytest.mark.parametrize("agree", [True, False])
def test_all_ranks_overlap_or_none(
    agree: bool,
    cache: Path,
    capturing: list[bool],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, overlap.__name__)
    monkeypatch.setattr(_log, "_seen", set())
    pretend_gpu(monkeypatch, measured(shape=SHAPE))
    overlap.save(GPU, {2: {SHAPE: 8}, 4: {OTHER: 2}})
    if not agree:
        found = iter([{SHAPE: 8}, {SHAPE: 4}])
        monkeypatch.setattr(overlap, "for_gpu", lambda gpu, ranks: next(found))

    def body(comm: Communicator) -> None:
        first = overlap.gains(comm, CPU)
        assert first == ({SHAPE: 8} if agree else {})
        assert overlap.gains(comm, CPU) is first  # Without another collective.

    run_threads(2, body)
    (one,), (comm, _) = Communicator.threads(1), Communicator.threads(2)
    capturing.append(True)
    for each in (one, comm):
        assert overlap.gains(each, CPU) == {}
    assert len(caplog.messages) == (not agree)
    assert agree or caplog.messages[0].endswith("has measured no gain on all ranks")


def test_saving_replaces_a_number_of_ranks_and_loading_finds(cache: Path) -> None:
    assert overlap.for_gpu(GPU, 2) is None
    file = overlap.save(GPU, {2: {SHAPE: 8, OTHER: 4}})
    assert file.parent == cache / "pipekernels" and file.name == "overlap-some-gpu.json"
    overlap.save(GPU, {8: {OTHER: 16}})
    assert overlap.for_gpu(GPU, 2) == {SHAPE: 8, OTHER: 4}
    assert overlap.for_gpu(GPU, 8) == {OTHER: 16} and overlap.for_gpu(GPU, 4) is None
    overlap.save(GPU, {2: {}})
    assert overlap.load(GPU) == {8: {OTHER: 16}}


RECORD = {"ranks": 2, "blocks": 8, **SHAPE._asdict()}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"products": None},
        {"products": [{"ranks": 2}]},
        {"products": [RECORD | {"ranks": "2"}]},
        {"products": [RECORD | {"blocks": 0}]},
        {"products": [RECORD | {"m": 1.5}]},
    ],
)
def test_a_bad_file_is_ignored_with_a_warning(cache: Path, change: dict[str, Any]) -> None:
    file = overlap.save(GPU, {2: {SHAPE: 8}})
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.warns(RuntimeWarning, match="write it anew with `pipekernels tune`"):
        assert overlap.for_gpu(GPU, 2) is None


class Clock:
    """A rank on a clock of its own, on which overlapped products take ``times`` seconds by thread
    blocks of the reduction, and all others 2 seconds."""

    def __init__(self, times: dict[int, float]) -> None:
        self.times, self.now = times, 0.0

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def barrier(self) -> None:
        self.now += 1.0  # Counts only if it is timed.

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self.now += 2.0 if op == "sum" else 0.0
        return tensor

    def overlapped(self, a: Tensor, b: Tensor, out: Tensor, comm: Clock, chosen: Chosen) -> None:
        assert (chosen.config, comm, out.shape) == (CONFIG, self, (len(a), len(b)))
        self.now += self.times[chosen.reducing_blocks]

    def seconds(self, call: Callable[[], object]) -> float:
        begin = self.now
        call()
        return self.now - begin


@pytest.mark.parametrize(("times", "best"), [({8: 1.5, 16: 1.6}, 8), ({8: 1.95}, None)])
def test_measuring_finds_what_gains(
    times: dict[int, float], best: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape("bfloat16", "forward", 1024, 16, 16)
    clock: Any = Clock(dict.fromkeys(tuning.CANDIDATES, 3.0) | times)
    monkeypatch.setattr(overlap, "gemm_all_reduce", clock.overlapped)
    monkeypatch.setattr(tuning, "gemm_into", lambda out, a, b: None)

    def measure(shape: Shape) -> dict[Shape, int]:
        pretend_gpu(monkeypatch, measured(shape=shape))
        return tuning.measure(clock, CPU, seconds=clock.seconds)

    assert measure(shape) == ({shape: best} if best else {})
    for never in ({"m": 512}, {"layout": "grad_weight"}, {"kind": "float8_e4m3fn"}):
        assert measure(shape._replace(**never)) == {}
    monkeypatch.setattr(tuning, "LIMIT", -1.0)
    assert measure(shape) == {}


def test_tune_measures_several_numbers_of_ranks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_world_size(measure: Any, sizes: list[int]) -> Any:
        ranks = (SimpleNamespace(rank=3, world_size=size) for size in sizes)
        return json.loads(json.dumps([[comm.world_size, measure(comm)] for comm in ranks]))

    used: list[torch.device] = []
    monkeypatch.setattr(tuning, "by_world_size", lambda *args: dict(by_world_size(*args)))
    found = {SHAPE: 8, OTHER: 2}
    monkeypatch.setattr(tuning, "measure", lambda comm, device: found)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert tuning.tune() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert "  6 ranks: 2 products gain" in tuning.tune()
    assert overlap.load(GPU) == dict.fromkeys((2, 4, 6), found)
    assert used == [torch.device("cuda", 3)] * 3

    def fail(*arguments: object) -> None:
        raise RuntimeError("GPU 0 cannot access GPU 1 directly")

    monkeypatch.setattr(tuning, "by_world_size", fail)
    [line] = tuning.tune()
    assert line.endswith("was not measured: GPU 0 cannot access GPU 1 directly")
