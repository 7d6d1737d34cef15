"""The configurations of the sharded GEMM for a product, and memory layouts of operands."""

from math import ceil

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipekernels.kernels.config import BLOCKS, KINDS, candidates, generation, variants
from pipekernels.kernels.layout import layout_of


@given(
    st.sampled_from([80, 90, 100]),
    st.sampled_from(KINDS),
    *[st.integers(1, 20000)] * 3,
    st.sampled_from([4, 108, 132, 148]),
)
def test_candidates_cover_every_product(
    era: int, kind: str, m: int, n: int, k: int, sms: int
) -> None:
    found = candidates(era, kind, m, n, k, sms)
    assert found and len(set(found)) == len(found)
    choice = BLOCKS[era, kind]
    for blocks, _, split_k in found:
        assert blocks in (choice.split_k if split_k > 1 else choice.full_tile)
        share = ceil(ceil(k / blocks.k) / split_k)
        assert share * (split_k - 1) < ceil(k / blocks.k)  # No program's share is empty.


def test_the_first_candidate_suits_the_product() -> None:
    """Large tiles if there are enough of them; split-K for few tiles with a large k."""
    large = candidates(90, "bfloat16", 8192, 8192, 8192, 132)[0]
    assert large.split_k == 1 and large.blocks.m * large.blocks.n == 128 * 256
    deep = candidates(90, "bfloat16", 1, 1024, 11008, 132)[0]
    assert deep.split_k > 1 and deep.blocks.m == 16
    wide = candidates(90, "bfloat16", 1, 8192, 8192, 132)[0]
    assert wide.split_k == 1 and wide.blocks.m == 16


def test_variants_compute_the_same_tiles_and_are_no_candidates() -> None:
    for (era, kind), choice in BLOCKS.items():
        found = [other for blocks in choice.full_tile for other in variants(era, kind, blocks)]
        assert set(found) == set(choice.measured_only) and not set(found) & set(choice.full_tile)
        tried = candidates(era, kind, 4096, 4096, 4096, 132)
        assert not {config.blocks for config in tried} & set(choice.measured_only)


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
