"""Tables of measured products: shape classes and files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels.gemm_cases import CONFIG, SHAPE, measured

from pipekernels import _cache
from pipekernels.kernels import table
from pipekernels.kernels.config import KINDS
from pipekernels.kernels.table import LAYOUTS, shape_class

BLOCKS = CONFIG.blocks._asdict()


@given(st.sampled_from(KINDS), st.sampled_from(LAYOUTS), *[st.integers(1, 1 << 20)] * 3)
def test_a_shape_class_holds_its_shapes(kind: str, layout: str, m: int, n: int, k: int) -> None:
    found = shape_class(kind, layout, m, n, k)
    assert shape_class(*found) == found  # A class is named by its largest shape.
    for size, most, tokens in zip((m, n, k), found[2:], "mnk", strict=True):
        is_tokens = tokens == ("k" if layout == "grad_weight" else "m")
        assert size <= most < size * (2 if is_tokens else 1.25) + (not is_tokens and size < 8)


def test_saving_adds_to_the_saved_table(cache: Path) -> None:
    assert table.for_gpu("Some GPU") is None
    odd = SHAPE._replace(m=50, k=61)  # In the same class.
    assert table.from_json(table.to_json(measured(shape=odd))) == measured(shape=odd)
    path = table.save(measured())
    assert path.is_relative_to(cache) and path.name == "sharded-gemm-some-gpu.json"
    assert table.for_gpu("Some GPU") == table.load("Some GPU") == measured()
    other = SHAPE._replace(m=128)
    table.save(measured(2.0, shape=other))
    both = table.for_gpu("Some GPU")
    assert both.entries == measured().entries | measured(2.0, shape=other).entries
    assert table.for_gpu("Another GPU") is None


def test_saved_measurements_take_precedence_over_shipped_ones(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "tables"
    folder.mkdir()
    monkeypatch.setattr(table, "FOLDER", folder)
    other = SHAPE._replace(m=128)
    shipped = measured()._replace(entries={**measured().entries, **measured(shape=other).entries})
    _cache.write(folder / "some-gpu.json", table.FORMAT, table.to_json(shipped))
    assert table.for_gpu("Some GPU") == shipped
    table.save(measured(3.0))
    found = table.for_gpu("Some GPU")
    assert found.entries == {**measured(3.0).entries, **measured(shape=other).entries}


@pytest.mark.parametrize("path", sorted(table.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_table_can_be_read(path: Path) -> None:
    measured = table.from_json(json.loads(path.read_text()))
    assert measured.entries
    assert path.stem == _cache.slug(measured.gpu)  # for_gpu() looks for this name.


@pytest.mark.parametrize(
    "change",
    [
        {"format": table.FORMAT + 1},
        {"gpu": None, "entries": 3},
        {"launch_seconds": 0},
        {"launch_seconds": True},
        {"entries": [{}]},
        {"entries": [{"kind": "int8"}]},
        {"entries": [{"m": 0}]},
        {"entries": [{"seconds": -1.0}]},
        {"entries": [{"speedup": "1"}]},
        {"entries": [{"config": [[128, 128, 64, 8, 4], 8, 1]}]},
        {"entries": [{"config": {"blocks": {"m": 128, "n": 128, "k": 64}}}]},
        {"entries": [{"config": {"blocks": BLOCKS, "group_m": 0}}]},
        {"entries": [{"config": {"blocks": BLOCKS | {"stages": 4.5}}}]},
        {"entries": [{"config": {"blocks": BLOCKS | {"parts": True}}}]},
        {"entries": [{"config": {"blocks": BLOCKS | {"flatten": 1}}}]},
        {"entries": [{"config": {"blocks": BLOCKS | {"promote": -1}}}]},
        {"entries": [{"config": {"blocks": BLOCKS | {"promote": True}}}]},
        {"entries": [{"config": {"blocks": BLOCKS | {"depth": 1}}}]},
        {"entries": [{"extra": 1.0}]},
    ],
)
def test_a_bad_file_is_ignored_with_a_warning_that_names_the_remedy(
    cache: Path, change: dict[str, Any]
) -> None:
    path = table.save(measured())
    record = json.loads(path.read_text())
    entries = change.get("entries")
    if isinstance(entries, list) and entries[0]:
        change = {"entries": [record["entries"][0] | entries[0]]}
    path.write_text(json.dumps(record | change))
    table.for_gpu.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(path))}.*`pipekernels tune`"):
        assert table.for_gpu("Some GPU") is None
