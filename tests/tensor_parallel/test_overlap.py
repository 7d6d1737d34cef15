"""The choice and the model of products that are overlapped with their all-reduce."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernels.gemm_cases import CONFIG, measured, pretend_gpu

from pipekernels.comm import links
from pipekernels.kernels.config import Blocks
from pipekernels.kernels.table import Shape
from pipekernels.tensor_parallel import overlap


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.integers(1, 50))
def test_overlapped_time_is_that_of_a_two_stage_pipeline(
    gemm: float, reduce: float, row_blocks: int
) -> None:
    end = 0.0
    for block in range(1, row_blocks + 1):
        end = max(end, gemm * block / row_blocks) + reduce / row_blocks
    assert overlap.overlapped_seconds(gemm, reduce, row_blocks) == pytest.approx(end)


def test_the_all_reduce_model() -> None:
    link = overlap.LinkModel(1e-6, 1e-9, 8e-9)
    assert overlap.all_reduce_seconds(0, 8, link) == 1e-6  # One step.
    assert overlap.all_reduce_seconds(10**9, 8, link) == pytest.approx(2 * 7 / 8, rel=1e-3)
    assert overlap.all_reduce_seconds(10**9, 8, link, blocks=4) == pytest.approx(3.5, rel=1e-3)
    assert overlap.all_reduce_seconds(10**9, 8, link, blocks=64) == pytest.approx(1.75, rel=1e-3)


@given(
    st.integers(1, 16384),
    st.integers(1, 16384),
    st.floats(1e-5, 1e-2),
    st.integers(2, 8),
    st.sampled_from([2, 16, 132]),
    st.sampled_from(sorted(overlap.LINK_MODELS)),
)
def test_best_overlap(
    m: int, n: int, seconds: float, ranks: int, sms: int, generation: int
) -> None:
    link, size = overlap.LINK_MODELS[generation], m * n * 2
    found = overlap.best_overlap(
        m, n, size, CONFIG, seconds, seconds, ranks=ranks, sms=sms, link=link
    )
    assert found.config.blocks == CONFIG.blocks
    row_blocks = ceil(m / (found.config.blocks.m * found.config.group_m))
    assert 1 <= found.config.group_m <= 8
    assert row_blocks >= min(overlap.ROW_BLOCKS, ceil(m / CONFIG.blocks.m))
    assert found.plain_seconds == seconds + overlap.all_reduce_seconds(size, ranks, link)

    def total(blocks: int) -> float:
        tiles = ceil(m / CONFIG.blocks.m) * ceil(n / CONFIG.blocks.n)
        gemm = seconds * ceil(tiles / (sms - blocks)) / ceil(tiles / sms)
        reduce = overlap.all_reduce_seconds(size, ranks, link, blocks) + row_blocks * link.alpha
        return overlap.overlapped_seconds(gemm, reduce, row_blocks)

    assert found.seconds == total(found.reducing_blocks)
    allowed = range(1, max(1, min(sms // 2, overlap.MOST_BLOCKS)) + 1)
    assert found.reducing_blocks in allowed
    assert found.seconds == min(map(total, allowed))


@pytest.mark.parametrize(("m", "n"), [(2048, 4096), (4096, 4096), (8192, 4096)])
def test_no_wave_is_added_where_it_costs_more_than_it_hides(m: int, n: int) -> None:
    """128x256 tiles, 132 multiprocessors: 8 fewer take 1.5, 1.25 and 1.125 times the waves."""
    config, link = CONFIG._replace(blocks=Blocks(128, 256, 64, 8, 3)), overlap.LINK_MODELS[90]
    found = overlap.best_overlap(m, n, 2 * m * n, config, 1e-3, 1e-3, ranks=2, sms=132, link=link)
    tiles = ceil(m / 128) * ceil(n / 256)
    assert found.reducing_blocks == 4
    assert ceil(tiles / (132 - found.reducing_blocks)) == ceil(tiles / 132)
    assert found.seconds < 1.1e-3


def test_auto_overlaps_only_measured_products_that_gain(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    shape = Shape("bfloat16", "forward", 4096, 8192, 8192)
    a, b, out = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((4096, 8192), (8192, 8192), (4096, 8192))
    )
    pretend_gpu(monkeypatch, None)
    assert overlap.choose_overlap(a, b, out, 2, "auto") is None
    pretend_gpu(monkeypatch, measured(seconds=8e-4, shape=shape))
    # Nothing is planned from assumed links, nor from those of another number of ranks.
    links.save("Some GPU", {4: overlap.LINK_MODELS[90]})
    assert overlap.choose_overlap(a, b, out, 2, "auto") is None
    assumed = overlap.choose_overlap(a, b, out, 2, "overlapped")
    slow = overlap.LINK_MODELS[90]._replace(block_beta=1e-9)
    links.save("Some GPU", {2: slow})
    found = overlap.choose_overlap(a, b, out, 2, "overlapped")
    assert found is not None and assumed is not None and found.seconds > assumed.seconds
    links.save("Some GPU", {ranks: overlap.LINK_MODELS[90] for ranks in (2, 8)})
    found = overlap.choose_overlap(a, b, out, 2, "auto")
    assert found is not None and found.seconds * overlap.GAIN < found.plain_seconds
    # A product of the same class with three quarters of the rows takes three quarters of the time.
    fewer = overlap.choose_overlap(a[:3072], b, out[:3072], 2, "auto")
    reduce = overlap.all_reduce_seconds(3072 * 8192 * 2, 2, overlap.LINK_MODELS[90])
    assert fewer is not None and fewer.plain_seconds == pytest.approx(0.75 * 8e-4 + reduce)
    capturing.append(True)
    assert overlap.choose_overlap(a, b, out, 2, "auto") is None
    assert overlap.choose_overlap(a, b, out, 2, "overlapped") == found
    capturing.clear()
    for algorithm, ranks in (("auto", 1), ("cublas", 2), ("triton", 2)):
        assert overlap.choose_overlap(a, b, out, ranks, algorithm) is None
    # A product much shorter than the reduction hides little of it, and few blocks reduce slower.
    pretend_gpu(monkeypatch, measured(seconds=2e-5, shape=shape))
    assert overlap.choose_overlap(a, b, out, 8, "auto") is None
    assert overlap.choose_overlap(a, b, out, 8, "overlapped") is not None
    pretend_gpu(monkeypatch, None)
    forced = overlap.choose_overlap(a, b, out, 8, "overlapped")
    assert forced is not None and forced.config.split_k == 1
