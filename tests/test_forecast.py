"""Forecasts of row-parallel layers on several GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipekernels import cli
from pipekernels.kernels import table
from pipekernels.kernels.config import Blocks, Config
from pipekernels.kernels.table import Entry, Shape, Table, shape_class
from pipekernels.ops.forecast import forecast, report
from pipekernels.tensor_parallel.overlap import Link, all_reduce_seconds

LINK = Link(1e-6, 1e-11, 4e-11)
M, N, K = 4096, 8192, 8192


def measured(split_k: int = 1) -> Table:
    """Times in proportion to the depth; Triton is faster for the whole product alone."""
    config = Config(Blocks(128, 128, 64, 8, 4), split_k=split_k)
    entries = [
        Entry(
            Shape("bfloat16", layout, M, N, K // degree),
            config, 8e-4 / degree, 8e-4 * speedup / degree, speedup,
        )
        for layout in ("forward", "grad_input")
        for degree, speedup in ((1, 1.25), (2, 0.5), (4, 0.5))
    ]  # fmt: skip
    by_class = {shape_class(*entry.shape): entry for entry in entries}
    return Table("Some GPU", "2026-01-31 12:00 UTC", {}, 5e-5, by_class)


def test_only_what_was_measured_is_forecast() -> None:
    rows = forecast(measured(), LINK, sms=132)
    # Halves and quarters of the whole layer, and the half of a layer of half the depth.
    assert [(row.in_features, row.ranks) for row in rows] == [(K // 2, 2), (K, 2), (K, 4)]
    for row in rows:
        assert (row.tokens, row.out_features) == (M, N)
        part = row.in_features // row.ranks
        assert row.single == pytest.approx(8e-4 if row.in_features == K else 2e-4)
        assert row.product == pytest.approx(4e-4 * part / K)  # By the faster library.
        assert row.all_reduce == all_reduce_seconds(M * N * 2, row.ranks, LINK)
        assert row.plain == row.product + row.all_reduce
        assert max(row.product, row.all_reduce) <= row.overlapped <= row.plain


def test_shared_tiles_are_not_overlapped() -> None:
    assert all(row.overlapped == row.plain for row in forecast(measured(2), LINK, sms=132))


def test_the_report_says_that_it_is_a_forecast_and_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = report(forecast(measured(), LINK, sms=132), measured(), LINK)
    assert text.startswith("FORECAST") and "nobody has measured these" in text
    for assumption in ("one Some GPU", "100 GB/s", "25 GB/s", "1.0 us per step"):
        assert assumption in text
    path = tmp_path / "some-gpu.json"
    path.write_text(json.dumps(table.to_json(measured())))
    assert cli.main(["forecast", str(path), "--bandwidth", "100", "--alpha", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == text.splitlines()[1:3]
