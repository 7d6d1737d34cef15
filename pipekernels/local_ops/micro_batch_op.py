"""The registered operations (schema, fake, autograd) that split tensors into microbatches and
concatenate them. They trace under ``torch.compile(fullgraph=True)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels._torch_private import below_autograd, current_raw_stream, tensors_of
from pipekernels.local_ops.dispatch import has_derivatives, is_observed

# The second argument of the operations: sizes of the microbatches to split into, or how many
# tensors each microbatch to concatenate has.
Layout = Sequence[int] | int

# What the native split casts to, as codes of c10::ScalarType.
_CASTS = {None: -1, torch.float64: 7, torch.float32: 6, torch.float16: 5, torch.bfloat16: 15}


# Call the result with separate sizes: torch takes longer to parse a list of sizes than to make a
# small tensor.
def _new_like(tensor: Tensor, dtype: torch.dtype | None) -> Callable[..., Tensor]:
    """A function that makes empty tensors of given sizes like ``tensor``, cast to ``dtype``."""
    if dtype is None or not tensor.is_floating_point():
        return tensor.new_empty
    return functools.partial(tensor.new_empty, dtype=dtype)


def _new_micro_batches(
    tensors: Sequence[Tensor], sizes: Sequence[int], dim: int, dtype: torch.dtype | None
) -> list[Tensor]:
    columns = []
    for tensor in tensors:
        new, before, after = _new_like(tensor, dtype), tensor.shape[:dim], tensor.shape[dim + 1 :]
        columns.append([new(*before, size, *after) for size in sizes])
    return [part for row in zip(*columns, strict=True) for part in row]


def _new_wholes(
    micro_batches: Sequence[Tensor], tensors: int, dim: int, dtype: torch.dtype | None
) -> list[Tensor]:
    batch = sum([part.shape[dim] for part in micro_batches[::tensors]])
    wholes = []
    for part in micro_batches[:tensors]:
        shape = list(part.shape)
        shape[dim] = batch
        wholes.append(_new_like(part, dtype)(*shape))
    return wholes


class _Function(torch.autograd.Function):
    """Both operations, each of which is the backward of the other.

    ``ctx.wanted`` says which tensors of a microbatch need gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        split: bool,
        layout: Any,
        dim: int,
        dtype: torch.dtype | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        results = (SPLIT if split else CONCAT)(list(tensors), layout, dim, dtype)
        ctx.split, ctx.layout, ctx.dim = split, layout, dim
        width = len(tensors) if split else layout
        ctx.sizes = layout if split else [t.shape[dim] for t in tensors[::width]]
        needs = ctx.needs_input_grad[4:]
        ctx.wanted = wanted = [any(needs[t::width]) for t in range(width)]
        # One microbatch tells the dtypes of all. If they differ, autograd casts the gradients.
        pairs = zip(tensors, wanted, strict=False)
        dtypes = {tensor.dtype for tensor, w in pairs if w and tensor.is_floating_point()}
        ctx.dtype_back = dtypes.pop() if dtype and len(dtypes) == 1 else None
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if not wanted[i % width]))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.wanted
        given = [grad for i, grad in enumerate(grads) if wanted[i % len(wanted)]]
        if ctx.split:
            results, present = CONCAT(given, sum(wanted), ctx.dim, ctx.dtype_back), wanted
        else:
            results = SPLIT(given, ctx.sizes, ctx.dim, ctx.dtype_back)
            present = wanted * len(ctx.sizes)
        ordered = iter(results)
        return None, None, None, None, *(next(ordered) if p else None for p in present)


class _Operation:
    """A registered operation that bypasses the dispatcher where this would only forward the call
    (which, for a kernel in Python, takes longer than a small copy).

    Args:
        schema: in ``torch.library``'s notation.
        split: whether it splits; otherwise it concatenates.
        new: makes its results, without values.
    """

    def __init__(self, schema: str, split: bool, new: Callable[..., list[Tensor]]) -> None:
        self._split = split
        self._new = new
        name = _library.define(schema)
        for key, kernel in (
            ("CPU", self._compute), ("CUDA", self._compute), ("Autograd", self._with_autograd)
        ):  # fmt: skip
            _library.impl(name, kernel, key)
        torch.library.register_fake(f"pipekernels::{name}", new, lib=_library)
        self._op: Callable[..., list[Tensor]] = getattr(torch.ops.pipekernels, name).default

    def __call__(
        self, tensors: list[Tensor], layout: Layout, dim: int, dtype: torch.dtype | None
    ) -> list[Tensor]:
        if not is_observed() and _backend.load().are_plain(tensors):
            return self.directly(tensors, layout, dim, dtype)
        return self._op(tensors, layout, dim, dtype)

    def directly(
        self, tensors: list[Tensor], layout: Layout, dim: int, dtype: torch.dtype | None
    ) -> list[Tensor]:
        """Bypass the dispatcher: for plain tensors, and if :func:`is_observed` is false."""
        if has_derivatives(tensors):
            return list(_Function.apply(self._split, layout, dim, dtype, *tensors))
        return self._compute(tensors, layout, dim, dtype)

    def _with_autograd(
        self, tensors: list[Tensor], layout: Layout, dim: int, dtype: torch.dtype | None
    ) -> list[Tensor]:
        """The kernel of the Autograd key: records a node only if a derivative may be needed."""
        if has_derivatives(tensors):
            return list(_Function.apply(self._split, layout, dim, dtype, *tensors))
        with below_autograd():
            return self._op(tensors, layout, dim, dtype)

    def _compute(
        self, tensors: list[Tensor], layout: Layout, dim: int, dtype: torch.dtype | None
    ) -> list[Tensor]:
        native, stream_of = _backend.load(), current_raw_stream if tensors[0].is_cuda else None
        # The stream of the copies, or on a CPU the number of their threads.
        by = stream_of(tensors[0].get_device()) if stream_of else torch.get_num_threads()
        if self._split and dtype in _CASTS:
            made = native.split_micro_batches(tensors, layout, dim, _CASTS[dtype], by)
            if made is not None:
                return tensors_of(made)
        results = self._new(tensors, layout, dim, dtype)
        wholes, parts = (tensors, results) if self._split else (results, tensors)
        if stream_of:
            _backend.require_cuda()
        copy = native.copy_micro_batches_cuda if stream_of else native.copy_micro_batches
        copy(self._split, dim, wholes, parts, by)
        return results


_library = torch.library.Library("pipekernels", "FRAGMENT")
SPLIT = _Operation(
    "split_micro_batches(Tensor[] tensors, SymInt[] sizes, int dim, ScalarType? dtype) -> Tensor[]",
    True,
    _new_micro_batches,
)
CONCAT = _Operation(
    "concat_micro_batches(Tensor[] micro_batches, int tensors, int dim, ScalarType? dtype)"
    " -> Tensor[]",
    False,
    _new_wholes,
)
