"""Split tensors into micro-batches and concatenate micro-batches, each in one native call.

Both are registered operations (schema, fake, autograd), so they trace under
``torch.compile(fullgraph=True)``. Each is the backward of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels._torch_private import (
    below_autograd,
    in_forward_mode,
    is_functionalizing,
    transforms_are_active,
)
from pipekernels.local_ops.dispatch import has_derivatives, is_observed


def micro_batch_sizes(batch: int, chunks: int) -> list[int]:
    """Sizes of the micro-batches of ``batch`` entries, as ``torch.tensor_split`` cuts them.

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
    """Copy ``tensors`` into contiguous micro-batches along dimension ``dim``.

    Args:
        tensors: a tensor, or several of any shapes and dtypes on one device that agree in their
            size along ``dim``. Any strides.
        chunks: the number of micro-batches; a smaller batch gives as many as it has entries.
            ``torch.export`` needs a batch of fixed size, as their number depends on it.
        dim: the batch dimension; may be negative.
        dtype: float64, float32, float16 or bfloat16: floating-point tensors are cast to it in the
            same pass, as by ``tensor.to(dtype)``. Other tensors, such as token ids and masks, keep
            their dtype. Gradients have the dtypes of the input.

    Returns:
        One entry per micro-batch, a tensor if one was given, else a tuple of tensors. Sizes differ
        by at most one, larger ones first. No memory is shared with the input or among the results.

    Raises:
        TypeError: an argument is not a strided tensor or not an integer; ``dtype``, or the dtype of
            a tensor to cast, is none of those four.
        ValueError: ``chunks`` below 1, ``dim`` out of range, sizes along ``dim`` or devices that
            differ, no tensor, a tensor without dimensions, or a tensor to cast whose memory is not
            aligned to its elements.
        RuntimeError: CUDA tensors with an extension built without CUDA.
    """
    single = isinstance(tensors, Tensor)
    group = [tensors] if isinstance(tensors, Tensor) else _as_list(tensors, "tensors")
    dim = _check_dim(group, dim)
    if not isinstance(chunks, int):
        raise TypeError(f"chunks must be an int, got {type(chunks).__name__}")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    batch = group[0].shape[dim]
    for i, tensor in enumerate(group):
        if tensor.shape[dim] != batch:
            raise ValueError(
                f"all tensors must have the same size along dimension {dim}: tensor 0 has {batch}, "
                f"tensor {i} has {tensor.shape[dim]}"
            )
    _check_casts(group, dtype)
    flat = _SPLIT(group, micro_batch_sizes(batch, chunks), dim, dtype)
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
    """Concatenate micro-batches along dimension ``dim``: the inverse of
    :func:`split_micro_batches`.

    Args:
        micro_batches: one entry per micro-batch, in order: a tensor, or a sequence of tensors that
            agree in their size along ``dim``. All entries have as many tensors, and the k-th has
            the same dtype, device and, except along ``dim``, shape in all of them. Any strides.
        dim: the batch dimension; may be negative.
        dtype: as in :func:`split_micro_batches`.

    Returns:
        A contiguous tensor, or a tuple of them if entries are sequences.

    Raises:
        TypeError: an argument is not a strided tensor, dtypes differ, or ``dtype`` or the dtype of
            a tensor to cast is not supported.
        ValueError: no micro-batch, ``dim`` out of range, shapes, lengths or devices that differ, or
            a tensor to cast whose memory is not aligned to its elements.
        RuntimeError: CUDA tensors with an extension built without CUDA.
    """
    entries = list(micro_batches)
    if not entries:
        raise ValueError("there is no micro-batch to concatenate; give at least one")
    single = isinstance(entries[0], Tensor)
    rows = [[e] if isinstance(e, Tensor) else _as_list(e, "a micro-batch") for e in entries]
    width = len(rows[0])
    for i, row in enumerate(rows):
        if len(row) != width or isinstance(entries[i], Tensor) != single:
            raise ValueError(
                f"all micro-batches must have the same structure: number 0 has {width} tensor(s), "
                f"number {i} has {len(row)}"
            )
    flat = [tensor for row in rows for tensor in row]
    # In all other cases are_plain_and_fit() below does these checks.
    if dtype is not None or width == 0 or not isinstance(dim, int) or dim < 0:
        dim = _check_dim(rows[0], dim)
        _check_casts(rows[0], dtype)
    # The quick native check accepts plain tensors only, and gives no reason when it fails.
    if not is_observed() and _backend.load().are_plain_and_fit(dim, width, flat):
        wholes = _CONCAT.directly(flat, width, dim, dtype)
    else:
        dim = _check_dim(rows[0], dim)
        for i, row in enumerate(rows):
            _check_fits(rows[0], row, dim, i)
        wholes = _CONCAT(flat, width, dim, dtype)
    return wholes[0] if single else tuple(wholes)


def _as_list(tensors: Any, what: str) -> list[Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{what} must be tensors in a list or tuple, got {type(tensors).__name__}")
    return list(tensors)


def _check_dim(group: list[Tensor], dim: int) -> int:
    """Validate the tensors of one micro-batch; returns ``dim`` as a non-negative number."""
    if not group:
        raise ValueError("there is no tensor; give at least one")
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    first = group[0]
    for i, tensor in enumerate(group):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, got {type(tensor).__name__} at position {i}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"tensor {i} has layout {tensor.layout}; use .to_dense() first")
        if tensor.is_nested:
            raise TypeError(f"tensor {i} is nested; use torch.nested.to_padded_tensor() first")
        if tensor.is_quantized:
            raise TypeError(f"tensor {i} has dtype {tensor.dtype}; use .dequantize() first")
        dims = tensor.dim()
        if not -dims <= dim < dims:
            raise ValueError(
                f"dim must be in -{dims}..{dims - 1} for tensor {i} of shape "
                f"{tuple(tensor.shape)}, got {dim}"
                if dims
                else f"tensor {i} has no dimension to split; use tensor[None]"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"all tensors must be on one device: tensor 0 is on {first.device}, tensor {i} on "
                f"{tensor.device}"
            )
        if dim < 0 and dims != first.dim():
            raise ValueError(
                f"dim={dim} is dimension {first.dim() + dim} of tensor 0 and {dims + dim} of "
                f"tensor {i}; use a non-negative dim"
            )
    return first.dim() + dim if dim < 0 else dim


def _check_fits(first: list[Tensor], row: list[Tensor], dim: int, index: int) -> None:
    """Raise unless micro-batch ``index``, ``row``, can be concatenated with micro-batch 0."""
    for t, (wanted, given) in enumerate(zip(first, row, strict=True)):
        if not isinstance(given, Tensor):
            raise TypeError(f"expected tensors, got {type(given).__name__} in micro-batch {index}")
        if given.dtype is not wanted.dtype:
            raise TypeError(
                f"dtypes must agree: micro-batch 0 has {wanted.dtype}, number {index} {given.dtype}"
            )
        if given.device != wanted.device:
            raise ValueError(
                f"devices must agree: micro-batch 0 is on {wanted.device}, number {index} on "
                f"{given.device}"
            )
        shape, before = given.shape, wanted.shape
        if shape != before and (
            len(shape) != len(before)
            or shape[:dim] != before[:dim]
            or shape[dim + 1 :] != before[dim + 1 :]
        ):
            raise ValueError(
                f"shapes must agree but in dimension {dim}: micro-batch 0 has {tuple(before)}, "
                f"number {index} {tuple(shape)}"
            )
        if t > 0 and shape[dim] != row[0].shape[dim]:
            raise ValueError(
                f"the tensors of a micro-batch must have the same size along dimension {dim}: in "
                f"number {index}, tensor 0 has {row[0].shape[dim]}, tensor {t} has {shape[dim]}"
            )


def _check_casts(group: list[Tensor], dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if dtype not in _FLOATING:
        raise TypeError(f"dtype must be {_FLOATING_NAMES}, got {dtype}")
    for i, tensor in enumerate(group):
        if tensor.is_floating_point() and tensor.dtype not in _FLOATING:
            raise TypeError(
                f"tensor {i} has dtype {tensor.dtype}, and only {_FLOATING_NAMES} are cast to "
                f"{dtype}; use .to({dtype}) first"
            )


# ---- the operations ------------------------------------------------------------------------------

_DEVICES = ("cpu", "cuda")
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FLOATING_NAMES = "float64, float32, float16 or bfloat16"


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


def _copy(split: bool, dim: int, wholes: list[Tensor], parts: list[Tensor]) -> None:
    native = _backend.load()
    device = wholes[0].device
    if device.type == "cpu":
        native.copy_micro_batches(split, dim, wholes, parts, torch.get_num_threads())
        return
    _backend.require_cuda()
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        native.copy_micro_batches_cuda(split, dim, wholes, parts, stream)


def _split(
    tensors: list[Tensor], sizes: list[int], dim: int, dtype: torch.dtype | None
) -> list[Tensor]:
    parts = _new_micro_batches(tensors, sizes, dim, dtype)
    _copy(True, dim, tensors, parts)
    return parts


def _concat(
    micro_batches: list[Tensor], tensors: int, dim: int, dtype: torch.dtype | None
) -> list[Tensor]:
    wholes = _new_wholes(micro_batches, tensors, dim, dtype)
    _copy(False, dim, wholes, micro_batches)
    return wholes


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        sizes: list[int], dim: int, dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(_SPLIT(list(tensors), sizes, dim, dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.sizes, ctx.dim, ctx.dtype, *tensors = inputs
        ctx.wanted = ctx.needs_input_grad[3:]
        ctx.dtype_back = _dtype_back(tensors, ctx.wanted, ctx.dtype)
        _mark_unwanted(ctx, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.wanted
        parts = [g for i, g in enumerate(grads) if wanted[i % len(wanted)]]
        wholes = iter(_CONCAT(parts, sum(wanted), ctx.dim, ctx.dtype_back))
        return None, None, None, *(next(wholes) if w else None for w in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        wholes = tangents[3:]
        given = [t for t in wholes if t is not None]
        parts = iter(_SPLIT(given, ctx.sizes, ctx.dim, ctx.dtype))
        return tuple(None if t is None else next(parts) for _ in ctx.sizes for t in wholes)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        sizes: list[int],
        dim: int,
        dtype: torch.dtype | None,
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        parts = _SPLIT(_batched(tensors, in_dims[3:], info.batch_size), sizes, dim + 1, dtype)
        return tuple(parts), (0,) * len(parts)


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(
        tensors: int, dim: int, dtype: torch.dtype | None, *micro_batches: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(_CONCAT(list(micro_batches), tensors, dim, dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, ctx.dim, ctx.dtype, *micro_batches = inputs
        ctx.sizes = [part.shape[ctx.dim] for part in micro_batches[::tensors]]
        needs = ctx.needs_input_grad[3:]
        ctx.wanted = [any(needs[t::tensors]) for t in range(tensors)]
        ctx.dtype_back = _dtype_back(micro_batches, ctx.wanted, ctx.dtype)
        _mark_unwanted(ctx, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.wanted
        wholes = [g for g, w in zip(grads, wanted, strict=True) if w]
        parts = iter(_SPLIT(wholes, ctx.sizes, ctx.dim, ctx.dtype_back))
        return None, None, None, *(next(parts) if w else None for _ in ctx.sizes for w in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        parts = tangents[3:]
        given = [t for t in parts if t is not None]
        first = parts[: len(ctx.wanted)]
        count = sum(t is not None for t in first)
        wholes = iter(_CONCAT(given, count, ctx.dim, ctx.dtype))
        return tuple(None if t is None else next(wholes) for t in first)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        tensors: int,
        dim: int,
        dtype: torch.dtype | None,
        *micro_batches: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        parts = _batched(micro_batches, in_dims[3:], info.batch_size)
        return tuple(_CONCAT(parts, tensors, dim + 1, dtype)), (0,) * tensors


def _batched(
    tensors: Sequence[Tensor], dims: Sequence[int | None], batch_size: int
) -> list[Tensor]:
    """``tensors`` with the dimension that ``torch.func.vmap`` maps over as the first one."""
    return [
        tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _mark_unwanted(ctx: Any, results: Sequence[Tensor]) -> None:
    """Mark results as non-differentiable where ``ctx.wanted`` says that their tensor needs no
    gradient. In forward mode torch itself decides which results have tangents."""
    if not in_forward_mode():
        wanted = ctx.wanted
        ctx.mark_non_differentiable(
            *(result for i, result in enumerate(results) if not wanted[i % len(wanted)])
        )


def _dtype_back(
    tensors: Sequence[Tensor], wanted: Sequence[bool], dtype: torch.dtype | None
) -> torch.dtype | None:
    """The dtype that a backward casts to; ``None`` if dtypes differ: then autograd casts."""
    if dtype is None:
        return None
    # Pairs of the first micro-batch only: the others have the same dtypes.
    pairs = zip(tensors, wanted, strict=False)
    given = {tensor.dtype for tensor, w in pairs if w and tensor.is_floating_point()}
    return given.pop() if len(given) == 1 else None


class _Operation:
    """A registered operation that bypasses the dispatcher where this would only forward the call
    (which, for a kernel in Python, takes longer than a small copy).

    Args:
        schema: in ``torch.library``'s notation.
        kernel: computes it on all of ``_DEVICES``.
        fake: returns empty results of the same shapes.
        function: computes it where a derivative may be needed.
    """

    def __init__(
        self,
        schema: str,
        kernel: Callable[..., list[Tensor]],
        fake: Callable[..., list[Tensor]],
        function: type[torch.autograd.Function],
    ) -> None:
        self._kernel = kernel
        self._function = function
        name = _library.define(schema)
        for device in _DEVICES:
            _library.impl(name, kernel, device.upper())
        _library.impl(name, self._with_autograd, "Autograd")
        torch.library.register_fake(f"pipekernels::{name}", fake, lib=_library)
        self._op: Callable[..., list[Tensor]] = getattr(torch.ops.pipekernels, name).default

    def __call__(self, tensors: list[Tensor], *args: Any) -> list[Tensor]:
        if not is_observed():
            if _backend.load().are_plain(tensors):
                return self.directly(tensors, *args)
            # The transforms of torch.func need an autograd function instead of the operation.
            if transforms_are_active() and not is_functionalizing():
                return list(self._function.apply(*args, *tensors))
        return self._op(tensors, *args)

    def directly(self, tensors: list[Tensor], *args: Any) -> list[Tensor]:
        """Bypass the dispatcher: for plain tensors, and if :func:`is_observed` is false."""
        if has_derivatives(tensors):
            return list(self._function.apply(*args, *tensors))
        return self._kernel(tensors, *args)

    def _with_autograd(self, tensors: list[Tensor], *args: Any) -> list[Tensor]:
        """The kernel of the Autograd key: records a node only if a derivative may be needed."""
        if has_derivatives(tensors):
            return list(self._function.apply(*args, *tensors))
        with below_autograd():
            return self._op(tensors, *args)


_library = torch.library.Library("pipekernels", "FRAGMENT")
_SPLIT = _Operation(
    "split_micro_batches(Tensor[] tensors, SymInt[] sizes, int dim, ScalarType? dtype) -> Tensor[]",
    _split,
    _new_micro_batches,
    _Split,
)
_CONCAT = _Operation(
    "concat_micro_batches(Tensor[] micro_batches, int tensors, int dim, ScalarType? dtype)"
    " -> Tensor[]",
    _concat,
    _new_wholes,
    _Concat,
)
