"""Operations on microbatches and collectives in plain torch and higher precision.

Those of the collectives take the tensors of all ranks at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# ---- microbatches ----


def split_micro_batches(
    tensors: Sequence[Tensor], chunks: int, dim: int, dtype: torch.dtype | None = None
) -> list[tuple[Tensor, ...]]:
    """One tuple of contiguous copies per microbatch, floating-point ones in ``dtype`` if given."""
    count = max(1, min(chunks, tensors[0].shape[dim]))
    slices = [_cast(t, dtype).tensor_split(count, dim) for t in tensors]
    copies = [[s.clone(memory_format=torch.contiguous_format) for s in group] for group in slices]
    return list(zip(*copies, strict=True))


def concat_micro_batches(
    micro_batches: Sequence[Sequence[Tensor]], dim: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """The inverse of :func:`split_micro_batches`."""
    groups = zip(*micro_batches, strict=True)
    return tuple(torch.cat([_cast(part, dtype) for part in parts], dim) for parts in groups)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


# ---- collectives ----


def all_reduce(inputs: list[Tensor], op: str = "sum", order: str = "rank") -> Tensor:
    """The elementwise reduction of ``inputs`` in rank or tree order, as every rank receives it.

    16-bit floating-point types are reduced in float32 and rounded once.
    """
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)

    def reduce(terms: list[Tensor]) -> Tensor:
        if len(terms) == 1:
            return terms[0].to(wide)
        left = len(terms) - 1
        if order == "tree":  # The largest power of two that leaves a term for the right subtree.
            left = 1 << left.bit_length() - 1
        return combine(reduce(terms[:left]), reduce(terms[left:]))

    total = reduce(inputs)
    if op == "avg":
        # By a tensor, as torch multiplies by the reciprocal of a number on CUDA.
        total = total / total.new_tensor(len(inputs))
    return total.to(dtype)


def reduce_scatter(inputs: list[Tensor], op: str = "sum", order: str = "rank") -> list[Tensor]:
    """The slice of the reduction along dimension 0 that each rank receives."""
    return list(all_reduce(inputs, op, order).chunk(len(inputs)))


def all_gather(inputs: list[Tensor]) -> Tensor:
    """The inputs of all ranks along dimension 0, as every rank receives them."""
    return torch.cat(inputs)


def gamma(terms: int, unit: float) -> float:
    """Relative error bound of a sum of products with ``terms`` roundings (Higham, 2002, 3.1)."""
    return terms * unit / (1 - terms * unit)
