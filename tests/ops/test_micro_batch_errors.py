"""Errors of splitting into microbatches and concatenating them."""

import re
from typing import Any

import pytest
import torch
from support.checks import assert_raises
from torch import Tensor, nn

from pipekernels.ops import concat_micro_batches, split_micro_batches

X = torch.zeros(4, 3)
NESTED = torch.nested.nested_tensor([X, X[:2]])
QUANTIZED = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
SPLIT_ERRORS: list[tuple[Any, Any, Any, type[Exception], str]] = [
    (X, 0, 0, ValueError, "chunks is 0; it must be an integer of at least 1"),
    (X, 2, 2, IndexError, "range of [-2, 1], but got 2"),
    (X, 2, "0", TypeError, "dim must be an int, got str"),
    ([], 2, 0, ValueError, "there is no tensor"),
    ([X, 1], 2, 0, TypeError, "expected tensors, got int at position 1"),
    (1, 2, 0, TypeError, "tensors must be tensors in a list or tuple, got int"),
    (torch.tensor(1.0), 2, 0, IndexError, "tensor has no dimensions"),
    ([X, X[:3]], 2, 0, ValueError, "microbatches hold 4 entries, the tensor has 3"),
    ([X, X[None]], 2, -1, ValueError, "of shape (4, 3), than of tensor 1, of shape (1, 4, 3)"),
    ([X, X.to("meta")], 2, 0, ValueError, "tensor 0 is on cpu, tensor 1 on meta"),
    (X.to_sparse(), 2, 0, TypeError, "layout torch.sparse_coo and dtype torch.float32; use"),
    ([X, NESTED], 2, 0, TypeError, "torch.float32, nested; use .to_dense(), torch.nested.to_pad"),
    (QUANTIZED, 2, 0, TypeError, "torch.strided and dtype torch.quint8; use"),
]
CONCAT_ERRORS: list[tuple[Any, Any, type[Exception], str]] = [
    ([], 0, ValueError, "there is no microbatch"),
    ([X, X.double()], 0, ValueError, "microbatch 1 differs in dtype from the first"),
    ([X, X[:, :2]], 0, ValueError, "microbatch 1 has shape (4, 2)"),
    ([X, X.to("meta")], 0, ValueError, "tensor 0 is on cpu, tensor 1 on meta"),
    ([(X, X), (X, X[:1])], 0, ValueError, "microbatch 1 differ in their size along dimension 0"),
    ([X], 2, IndexError, "range of [-2, 1], but got 2"),
    ([(X, X), (X,)], 0, ValueError, "number 0 has 2 tensor(s), number 1 has 1"),
    ([X, (X,)], 0, ValueError, "the same structure"),
    ([X, 1], 0, TypeError, "a microbatch must be tensors in a list or tuple, got int"),
]


CAST_ERRORS: list[tuple[Any, Any, type[Exception], str]] = [
    (X, torch.int32, ValueError, "cannot cast float32 to int32; both must be float64, float32,"),
    (X, "float16", TypeError, "must be torch.dtype, not str"),
    (X.to(torch.float8_e4m3fn), torch.float16, ValueError, "differ in dtype only if both are"),
]


def test_errors() -> None:
    for tensors, chunks, dim, error, message in SPLIT_ERRORS:
        assert_raises(error, re.escape(message), split_micro_batches, tensors, chunks, dim)
    for parts, dim, error, message in CONCAT_ERRORS:
        assert_raises(error, re.escape(message), concat_micro_batches, parts, dim)
    for x, dtype, error, message in CAST_ERRORS:
        assert_raises(error, re.escape(message), split_micro_batches, x, 2, dtype=dtype)
        assert_raises(error, re.escape(message), concat_micro_batches, [x], dtype=dtype)


def test_unaligned_elements_cannot_be_cast() -> None:
    x = torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1)
    assert torch.equal(torch.cat(split_micro_batches(x, 2)), x)
    with pytest.raises(ValueError, match=re.escape("not aligned to its elements; clone() it")):
        split_micro_batches(x, 2, dtype=torch.float64)
    assert torch.equal(
        torch.cat(split_micro_batches(x.clone(), 2, dtype=torch.float64)), x.double()
    )


def test_tensors_without_memory_of_their_own() -> None:
    """Tensor wrappers work, as the dispatcher unwraps them; tensors with freed memory raise."""
    x = torch.arange(8.0)

    def split_and_concat(x: Tensor) -> Tensor:
        return concat_micro_batches(split_micro_batches(x, 3))

    assert torch.func.functionalize(split_and_concat)(x).equal(x)
    assert split_and_concat(torch._efficientzerotensor(4)).equal(torch.zeros(4))
    freed = torch.ones(8, 4)
    views = [freed, freed[2:], freed[:, 1:], nn.Parameter(freed)[2:]]
    freed.untyped_storage().resize_(0)
    for view in views:
        rows = torch.ones(8, view.shape[1])
        for call in (
            lambda view=view: split_micro_batches(view, 2),
            lambda view=view, rows=rows: concat_micro_batches([rows, view]),
        ):
            with pytest.raises(ValueError, match="no memory of its own"):
                call()
    assert len(split_micro_batches(freed[:0], 2)) == 1
