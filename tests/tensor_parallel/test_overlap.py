"""Which products are overlapped with their all-reduce: measurements, their file, the choice."""

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
from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS
from pipekernels.kernels.table import Shape, Table
from pipekernels.local_ops.gemm_choice import Chosen, choose
from pipekernels.tensor_parallel import overlap
from pipekernels.tensor_parallel.overlap import tuning

GPU = "Some GPU"
CPU = torch.device("cpu")
SHAPE = Shape("bfloat16", "forward", 4096, 8192, 8192)
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


def known(shape: Shape = SHAPE, *overlaps: tuple[int, int], speedup: float = 1.5) -> Table:
    """A table with one product, which gains from overlap with so many ranks, by so many blocks."""
    one = measured(speedup=speedup, shape=shape)
    return one._replace(
        entries={key: e._replace(overlaps=overlaps) for key, e in one.entries.items()}
    )


def test_auto_overlaps_the_products_that_were_measured_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(monkeypatch, known(SHAPE, (2, 8), speedup=1.0))
    assert choose(*product()) is None and choose(*product(), ranks=4) is None
    assert choose(*product(), ranks=2) == OVERLAPPED
    assert choose(*product(3072), ranks=2) == OVERLAPPED  # Of the same class.
    assert choose(*product(1024), ranks=2) is None
    assert choose(*product(dtype=torch.float64), ranks=2) is None
    pretend_gpu(monkeypatch, None)
    assert choose(*product(), ranks=2) is None


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
    capturing: list[bool],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, overlap.__name__)
    monkeypatch.setattr(_log, "_seen", set())
    pretend_gpu(monkeypatch, known(SHAPE, (2, 8)))
    if not agree:
        tables = iter([known(SHAPE, (2, 8)), known(SHAPE, (2, 4))])
        monkeypatch.setattr(overlap.table, "for_gpu", lambda gpu: next(tables))

    def body(comm: Communicator) -> None:
        for _ in range(2):  # The second time without a collective.
            assert overlap.ranks_that_overlap(comm, CPU) == (2 if agree else 1)

    run_threads(2, body)
    assert len(caplog.messages) == (not agree)
    assert agree or caplog.messages[0].endswith("has measured no gain on all ranks")


def test_nothing_overlaps_on_one_rank_without_a_gain_or_in_a_capture(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, known(SHAPE, (2, 8)))

    def body(comm: Communicator) -> int:
        return overlap.ranks_that_overlap(comm, CPU)

    assert run_threads(1, body) == [1] and run_threads(3, body) == [1] * 3
    capturing.append(True)
    assert run_threads(2, body) == [1, 1]


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

    def overlapped(self, a: Tensor, b: Tensor, out: Tensor, comm: "Clock", chosen: Chosen) -> None:
        assert (chosen.config, comm, out.shape) == (CONFIG, self, (len(a), len(b)))
        self.now += self.times[chosen.reducing_blocks]

    def seconds(self, call: Callable[[], object]) -> float:
        begin = self.now
        call()
        return self.now - begin


@pytest.mark.parametrize(("times", "best"), [({8: 1.5, 16: 1.6}, 8), ({8: 1.95}, 0)])
def test_measuring_finds_what_gains(
    times: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape("bfloat16", "forward", 1024, 16, 16)
    clock: Any = Clock(dict.fromkeys(tuning.CANDIDATES, 3.0) | times)
    monkeypatch.setattr(overlap, "gemm_all_reduce", clock.overlapped)
    monkeypatch.setattr(tuning, "gemm_into", lambda out, a, b: None)

    def measure(shape: Shape) -> list[tuple[Shape, int]]:
        pretend_gpu(monkeypatch, known(shape))
        return tuning.measure(clock, CPU, seconds=clock.seconds)

    assert measure(shape) == [(shape, best)]
    for never in ({"m": 512}, {"layout": "grad_weight"}, {"kind": "float8_e4m3fn"}):
        assert measure(shape._replace(**never)) == []
    monkeypatch.setattr(tuning, "LIMIT", -1.0)
    assert measure(shape) == []


def test_tune_measures_several_numbers_of_ranks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_world_size(measure: Any, sizes: list[int]) -> Any:
        ranks = (SimpleNamespace(rank=3, world_size=size) for size in sizes)
        return json.loads(json.dumps([[comm.world_size, measure(comm)] for comm in ranks]))

    used: list[torch.device] = []
    monkeypatch.setattr(tuning, "by_world_size", lambda *args: dict(by_world_size(*args)))
    table.save(known(SHAPE, (2, 8), (8, 8))._replace(gpu=GPU))
    monkeypatch.setattr(
        tuning, "measure", lambda comm, device: [(SHAPE, 16 if comm.world_size > 2 else 0)]
    )
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert tuning.tune() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    lines = tuning.tune()
    assert "  2 ranks: 0 of 1 products gain" in lines and "  6 ranks: 1 of 1 products" in lines[3]
    saved = table.load(GPU)
    assert saved is not None and saved.entries[SHAPE].overlaps == ((4, 16), (6, 16), (8, 8))
    assert used == [torch.device("cuda", 3)] * 3

    def fail(*arguments: object) -> None:
        raise RuntimeError("GPU 0 cannot access GPU 1 directly")

    monkeypatch.setattr(tuning, "by_world_size", fail)
    [line] = tuning.tune()
    assert line.endswith("was not measured: GPU 0 cannot access GPU 1 directly")
