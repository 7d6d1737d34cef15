"""The links between GPUs: their measurement on a pretended clock, their file, the command."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipekernels.comm import link_tuning, links
from pipekernels.comm.links import LinkModel

GPU = "Some GPU (R) 80GB"
LINK = LinkModel(4e-6, 1 / 340e9, 1 / 25e9)
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("link", [LINK, LinkModel(2e-5, 1 / 20e9, 1 / 20e9)])
def test_measuring_recovers_the_model(ranks: int, link: LinkModel) -> None:
    clock: Any = Clock(ranks, link)
    found = link_tuning.measure(clock, CPU, seconds=clock.seconds)
    assert found == pytest.approx(link, rel=1e-3)
    assert set(clock.blocks) == {1, 2, 4, 8, 16, 32, 64}


def test_noise_is_left_out_or_refused() -> None:
    clock: Any = Clock(4, LINK, noise=0.02)
    found = link_tuning.measure(clock, CPU, seconds=clock.seconds)
    assert found == pytest.approx(LINK, rel=0.05)
    times = iter([1.0] + [0.5] * 7)  # The smallest tensor takes longest.
    with pytest.raises(ValueError, match="too noisy"):
        link_tuning.measure(
            clock,
            CPU,
            seconds=lambda call: next(times),
            rounds=1,
        )
    clock.world_size = 1
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        link_tuning.measure(clock, CPU)


def test_saving_adds_and_loading_finds(cache: Path) -> None:
    assert links.for_gpu(GPU, 2) is None
    file = links.save(GPU, {2: LINK})
    assert file.parent == cache / "pipekernels" and file.name == "links-some-gpu-r-80gb.json"
    other = LINK._replace(alpha=1e-5)
    links.save(GPU, {8: other})
    assert (links.for_gpu(GPU, 2), links.for_gpu(GPU, 8)) == (LINK, other)
    assert links.for_gpu(GPU, 4) is None and links.for_gpu("another", 2) is None


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
def test_a_bad_file_is_ignored_with_a_warning(cache: Path, change: dict[str, Any]) -> None:
    file = links.save(GPU, {2: LINK})
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.warns(RuntimeWarning, match="write it anew with `pipekernels tune`"):
        assert links.for_gpu(GPU, 2) is None


def test_tune_measures_several_numbers_of_ranks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Everyone(contextlib.nullcontext["Everyone"]):
        def __init__(self, size: int) -> None:
            super().__init__(self)
            self.size = size

        def split(self, color: int | None) -> Everyone | None:
            return Everyone(sizes.pop(0)) if color == 0 else None

        def barrier(self) -> None:
            pass

    def run_ranks(body: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
        sizes[:] = arguments[1]
        for rank in reversed(range(ranks)):
            sizes[:] = [size for size in arguments[1] if rank < size]
            body(rank, *arguments)

    def from_store(store: object, rank: int, size: int, *, timeout: float) -> Everyone:
        return Everyone(size)

    sizes: list[int] = []
    used: list[int] = []
    monkeypatch.setattr(link_tuning, "run_ranks", run_ranks)
    monkeypatch.setattr(link_tuning.Communicator, "from_store", from_store)
    monkeypatch.setattr(
        link_tuning, "measure", lambda some, device: LINK._replace(alpha=some.size * 1e-6)
    )
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert link_tuning.tune() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    report = "\n".join(link_tuning.tune())
    assert "6 ranks: 6.0 us, 340 GB/s, 25.0 GB/s per thread block" in report
    assert used == [5, 4, 3, 2, 1, 0]
    assert {ranks: link.alpha for ranks, link in links.load(GPU).items()} == pytest.approx(
        {2: 2e-6, 4: 4e-6, 6: 6e-6}
    )

    def fail(*arguments: object) -> None:
        raise RuntimeError("GPU 0 cannot access GPU 1 directly")

    monkeypatch.setattr(link_tuning, "run_ranks", fail)
    assert link_tuning.tune() == [
        "links between GPUs were not measured: GPU 0 cannot access GPU 1 directly"
    ]
