"""Split tensors into microbatches and concatenate microbatches, each in one native call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels._arguments import check_kind, integer
from pipekernels._torch_private import current_raw_stream, tensors_of
from pipekernels.ops.dispatch import define, has_derivatives, is_observed

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
    return [
        _new_like(part, dtype)(*part.shape[:dim], batch, *part.shape[dim + 1 :])
        for part in micro_batches[:tensors]
    ]


class _Function(torch.autograd.Function):
    """Both operations, each of which is the backward of the other."""

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
        width = len(tensors) if split else layout  # Tensors of a microbatch.
        ctx.sizes = layout if split else [t.shape[dim] for t in tensors[::width]]
        # A tensor needs gradients in all microbatches if it does in one; the others take none.
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
        # In the order of the forward's inputs, which lacks those that need no gradient.
        ordered = iter(results)
        return None, None, None, None, *(next(ordered) if p else None for p in present)


class _Operation:
    """A registered operation that bypasses the dispatcher where this would only forward the call:
    for a kernel in Python that takes longer than a small copy. Its arguments are tensors, a layout,
    the dimension and the dtype."""

    def __init__(self, schema: str, split: bool, new: Callable[..., list[Tensor]]) -> None:
        self._split = split  # Otherwise it concatenates.
        self._new = new  # Makes the results, without values.
        self._op = define(schema, self._compute, new, apply=self._apply)

    def __call__(self, tensors: list[Tensor], *options: Any) -> list[Tensor]:
        if not is_observed() and _backend.load().are_plain(tensors):
            return self.directly(tensors, *options)
        results: list[Tensor] = self._op(tensors, *options)
        return results

    def directly(self, tensors: list[Tensor], *options: Any) -> list[Tensor]:
        """Bypass the dispatcher: for plain tensors, and if :func:`is_observed` is false."""
        run = self._apply if has_derivatives(tensors) else self._compute
        return run(tensors, *options)

    def _apply(self, tensors: list[Tensor], *options: Any) -> list[Tensor]:
        return list(_Function.apply(self._split, *options, *tensors))

    def _compute(
        self, tensors: list[Tensor], layout: Layout, dim: int, dtype: torch.dtype | None
    ) -> list[Tensor]:
        native, is_cuda = _backend.load(), tensors[0].is_cuda
        stream_of = current_raw_stream if is_cuda else None
        # The stream of the copies, or on a CPU the number of their threads.
        by = stream_of(tensors[0].get_device()) if stream_of else torch.get_num_threads()
        # A split allocates its results natively, where the extension can.
        if self._split and dtype in _CASTS:
            made = native.split_micro_batches(tensors, layout, dim, _CASTS[dtype], by)
            if made is not None:
                return tensors_of(made)
        results = self._new(tensors, layout, dim, dtype)
        wholes, parts = (tensors, results) if self._split else (results, tensors)
        if is_cuda:
            _backend.require_cuda()
        copy = native.copy_micro_batches_cuda if is_cuda else native.copy_micro_batches
        copy(self._split, dim, wholes, parts, by)
        return results


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


def micro_batch_sizes(batch: int, chunks: int) -> list[int]:
    """Sizes of the microbatches of ``batch`` entries, as ``torch.tensor_split`` cuts them.

    There are ``max(1, min(chunks, batch))``; they differ by at most one, larger ones first.
    """
    count = max(1, min(chunks, batch))
    size, larger = batch // count, batch % count  # divmod() does not support symbolic sizes.
    return [size + 1] * larger + [size] * (count - larger)


@overload
def split_micro_batches(
    tensors: Tensor, chunks: int, dim: int = 0, *, dtype: torch.dtype | None = None
) -> list[Tensor]: ...


@overload
def split_micro_batches(
    tensors: Sequence[Tensor], chunks: int, dim: int = 0, *, dtype: torch.dtype | None = None
) -> list[tuple[Tensor, ...]]: ...


def split_micro_batches(
    tensors: Tensor | Sequence[Tensor],
    chunks: int,
    dim: int = 0,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor] | list[tuple[Tensor, ...]]:
    """Copy ``tensors`` into contiguous microbatches along dimension ``dim``.

    Args:
        tensors: a tensor, or several of any shapes, strides and dtypes on one device that agree in
            their size along ``dim``.
        chunks: the number of microbatches; a smaller batch gives as many as it has entries.
            ``torch.export`` needs a batch of fixed size, as their number depends on it.
        dim: the batch dimension; may be negative.
        dtype: float64, float32, float16 or bfloat16, to which tensors of these four are cast in the
            same pass. Other tensors keep their dtype; gradients have the dtypes of the input.

    Returns:
        One entry per microbatch, a tensor if one was given, else a tuple of tensors. Sizes differ
        by at most one, larger ones first. No memory is shared with the input or among the results.

    Raises:
        TypeError: an argument is not a strided tensor.
        IndexError: ``dim`` is out of range.
        ValueError: ``chunks`` is not a positive integer; no tensor; sizes along ``dim`` or devices
            that differ; a cast between other dtypes, or of memory not aligned to its elements.
        RuntimeError: CUDA tensors with an extension built without CUDA.
    """
    single = isinstance(tensors, Tensor)
    group = [tensors] if isinstance(tensors, Tensor) else _as_list(tensors, "tensors")
    # For plain tensors and numbers, the native checks are enough.
    quick = group and type(dim) is int and type(chunks) is int and dim >= 0 and chunks > 0
    plain = quick and not is_observed() and _backend.load().are_plain(group)
    if plain and dim < min([t.ndim for t in group]):
        run = SPLIT.directly
    else:
        run, dim, chunks = SPLIT, _check(group, dim), integer("chunks", chunks)
    flat = run(group, micro_batch_sizes(group[0].shape[dim], chunks), dim, dtype)
    if single:
        return flat
    return [tuple(flat[i : i + len(group)]) for i in range(0, len(flat), len(group))]


@overload
def concat_micro_batches(
    micro_batches: Sequence[Tensor], dim: int = 0, *, dtype: torch.dtype | None = None
) -> Tensor: ...


@overload
def concat_micro_batches(
    micro_batches: Sequence[Sequence[Tensor]], dim: int = 0, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]: ...


def concat_micro_batches(
    micro_batches: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    dim: int = 0,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Concatenate microbatches along dimension ``dim``: the inverse of
    :func:`split_micro_batches`.

    Args:
        micro_batches: one entry per microbatch, in order: a tensor, or a sequence of tensors that
            agree in their size along ``dim``. All entries have as many tensors, and the k-th has
            the same dtype, device and, except along ``dim``, shape in all of them. Any strides.
        dim: the batch dimension; may be negative.
        dtype: as in :func:`split_micro_batches`.

    Returns:
        A contiguous tensor, or a tuple of them if entries are sequences.

    Raises:
        TypeError, IndexError, RuntimeError: as :func:`split_micro_batches`.
        ValueError: no microbatch; shapes, dtypes, lengths or devices that differ; a cast between
            other dtypes, or of memory not aligned to its elements.
    """
    entries = list(micro_batches)
    if not entries:
        raise ValueError("there is no microbatch to concatenate; give at least one")
    single = isinstance(entries[0], Tensor)
    rows = [[e] if isinstance(e, Tensor) else _as_list(e, "a microbatch") for e in entries]
    width = len(rows[0])
    for i, row in enumerate(rows):
        if len(row) != width or isinstance(entries[i], Tensor) != single:
            raise ValueError(
                f"all microbatches must have the same structure: number 0 has {width} tensor(s), "
                f"number {i} has {len(row)}"
            )
    flat = [tensor for row in rows for tensor in row]
    # The quick native check accepts plain tensors only, and gives no reason when it fails.
    is_valid = isinstance(dim, int) and dim >= 0 and width > 0 and not is_observed()
    if is_valid and _backend.load().are_plain_and_fit(dim, width, flat):
        wholes = CONCAT.directly(flat, width, dim, dtype)
    else:
        wholes = CONCAT(flat, width, _check(flat, dim), dtype)
    return wholes[0] if single else tuple(wholes)


def _as_list(tensors: Any, what: str) -> list[Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{what} must be tensors in a list or tuple, got {type(tensors).__name__}")
    return list(tensors)


def _check(tensors: list[Tensor], dim: int) -> int:
    """Check all that the native copy does not; returns ``dim`` as a non-negative number."""
    if not tensors:
        raise ValueError("there is no tensor; give at least one")
    check_kind("dim", dim, int, "an int")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, got {type(tensor).__name__} at position {i}")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise TypeError(
                f"tensor {i} is not a dense one: it has layout {tensor.layout} and dtype "
                f"{tensor.dtype}{', nested' if tensor.is_nested else ''}; use .to_dense(), "
                "torch.nested.to_padded_tensor() or .dequantize() first"
            )
        tensor.size(dim)  # IndexError if there is no such dimension.
        if tensor.device != first.device:
            raise ValueError(
                f"all tensors must be on one device: tensor 0 is on {first.device}, tensor {i} on "
                f"{tensor.device}"
            )
        if dim < 0 and tensor.dim() != first.dim():
            raise ValueError(
                f"dim={dim} is another dimension of tensor 0, of shape {tuple(first.shape)}, than "
                f"of tensor {i}, of shape {tuple(tensor.shape)}; use a non-negative dim"
            )
    return first.dim() + dim if dim < 0 else dim
