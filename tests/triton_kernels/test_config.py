"""The configurations of the sharded GEMM for a product, and memory layouts of operands."""

from math import ceil

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipekernels.triton_kernels.config import PRECISIONS, TILES, config_for, generation
from pipekernels.triton_kernels.layout import layout_of


@given(
    st.sampled_from([80, 90, 100]),
    st.sampled_from(PRECISIONS),
    *[st.integers(1, 20000)] * 3,
    st.sampled_from([4, 108, 132, 148]),
)
def test_every_product_has_a_configuration(
    era: int, precision: str, m: int, n: int, k: int, sms: int
) -> None:
    blocks, _, split_k = config_for(era, precision, m, n, k, sms)
    tiles = TILES[era, precision]
    assert blocks in (tiles.few, tiles.middle, tiles.many)
    assert split_k == 1 or blocks == tiles.few
    share = ceil(ceil(k / blocks.k) / split_k)
    assert share * (split_k - 1) < ceil(k / blocks.k)  # No program's share is empty.


def test_generations_of_gpus() -> None:
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    assert [generation(c) for c in capabilities] == [80, 80, 80, 90, 100, 100, 80]


def test_layouts() -> None:
    rows = torch.empty(32, 64, dtype=torch.bfloat16)
    columns = torch.empty(64, 32, dtype=torch.bfloat16).t()
    assert layout_of(rows, rows) == "forward"
    assert layout_of(rows, columns) == "grad_input"
    assert layout_of(columns, columns) == "grad_weight"
    assert layout_of(columns, rows) is None
    assert layout_of(rows[:, 1:], rows) is None  # Not aligned to 16 bytes.
    assert layout_of(rows[:, :60], rows[:, :60]) == "forward"
    assert layout_of(torch.empty(32, 60, dtype=torch.bfloat16), rows) is None
    assert layout_of(torch.empty(1, 60, dtype=torch.bfloat16), rows) == "forward"  # One row.
    assert layout_of(rows[:1].expand(32, 64), rows) is None
