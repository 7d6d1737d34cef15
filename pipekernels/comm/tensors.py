"""Checks and conversions of the tensors given to collectives: dtypes, layout, memory, shapes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipekernels import _backend
from pipekernels._arguments import check_integer, check_kind
from pipekernels.comm.codes import codes


def check_tensor(value: object, what: str = "a communicator") -> None:
    """Raise TypeError, which begins with ``what``, unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        name = type(value).__name__
        raise TypeError(f"{what} works on tensors, got {name}; pass torch.as_tensor(...)")


def check_dense(tensor: Tensor) -> None:
    """Raise ValueError for devices, layouts, dtypes and memory that are not supported."""
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(
            f"a communicator works on CPU and CUDA tensors, got one on {tensor.device}; "
            "pass tensor.cpu()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"a communicator works on dense tensors, got one of layout {tensor.layout} and "
            f"{tensor.dtype}; pass tensor.to_dense() or tensor.dequantize(), or its parts"
        )
    _backend.load().check_memory(tensor)


def to_dense(tensor: Tensor) -> Tensor:
    """``tensor`` itself if it is contiguous and neither conjugate nor negative, else a copy that
    is. Raises what :func:`check_dense` does."""
    check_dense(tensor)
    if tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor
    return tensor.detach().resolve_neg().resolve_conj().contiguous()


def to_dense_in_place(tensor: Tensor) -> Tensor:
    """:func:`to_dense` for a tensor that is changed in place; see :func:`put_back`."""
    dense = to_dense(tensor)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    if dense is not tensor and any(size > 1 and stride == 0 for size, stride in pairs):
        raise ValueError(
            "a tensor that is changed in place must not have several elements in one place, got "
            f"shape {tuple(tensor.shape)} and strides {tensor.stride()}; pass tensor.contiguous()"
        )
    return dense


def put_back(dense: Tensor, tensor: Tensor) -> Tensor:
    """Copy ``dense``, the result of :func:`to_dense_in_place`, back to ``tensor``; returns that."""
    if dense is tensor:
        mark_changed(tensor)
    else:
        with torch.inference_mode():  # Allows writes to inference tensors.
            tensor.copy_(dense)
    return tensor


def check_reducible(tensor: Tensor, op: str, algorithm: str = "auto", order: str = "rank") -> None:
    """Raise TypeError if the dtype cannot be reduced; ValueError for an unknown ``op``,
    ``algorithm`` or ``order``, and for averages of integers."""
    known = codes()
    for name, value, valid in (
        ("op", op, known.operations),
        ("order", order, known.orders),
        ("algorithm", algorithm, known.algorithms),
    ):
        if value not in valid:
            raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
    if tensor.dtype not in known.reducible:
        names = ", ".join(map(str, known.reducible))
        raise TypeError(f"cannot reduce {tensor.dtype}; convert the tensor to one of {names}")
    if op == "avg" and not tensor.is_floating_point():
        raise ValueError(
            f"an average of {str(tensor.dtype).removeprefix('torch.')} is not an integer; use "
            "op='sum', or convert to a float type"
        )


def output_for(
    dense: Tensor, shape: tuple[int, ...], out: Tensor | None, own: int | None = None
) -> Tensor:
    """``out`` if it is fit for a result of ``shape``, like ``dense``; a new one for ``None``. At
    byte ``own`` of it the input ``dense`` may lie."""
    if out is None:
        return torch.empty(shape, dtype=dense.dtype, device=dense.device)
    check_kind("out", out, Tensor, "a tensor or None")
    fits = out.shape == shape and out.dtype == dense.dtype and out.device == dense.device
    if not fits or to_dense(out) is not out:
        raise ValueError(
            f"out must be a contiguous tensor of shape {shape} and {dense.dtype} on "
            f"{dense.device}, got one of shape {tuple(out.shape)}, strides {out.stride()} and "
            f"{out.dtype} on {out.device}"
        )
    # Peers read the input while this rank writes its output, unless the call leaves it in place.
    offset = dense.data_ptr() - out.data_ptr()
    if -dense.nbytes < offset < out.nbytes and offset != own:
        raise ValueError("out must not overlap the input; pass another tensor")
    return out


def allocated(
    allocate: Callable[[Sequence[int], int], Any], sizes: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """An uninitialised contiguous tensor in memory that this package allocates. ``allocate`` takes
    sizes and a code of a dtype; it returns a DLPack capsule, or None without room."""
    code = codes().reducible.get(dtype)
    if code is not None and 0 not in sizes:  # Of sizes that overflow, torch frees a capsule twice.
        capsule = allocate(sizes, code)
        return capsule if capsule is None else from_dlpack(capsule)
    # Older versions of torch read few dtypes. sizes.numel() would overflow beyond 64 bits.
    count = min(math.prod(sizes) * dtype.itemsize, sys.maxsize)
    capsule = allocate((count,), codes().movable[torch.uint8])
    if capsule is None:
        return None
    # Not a view: a view that a custom autograd function returns cannot be modified.
    memory = from_dlpack(capsule)
    return memory.new_empty(0, dtype=dtype).set_(memory.untyped_storage()).resize_(sizes)


def elements_of(dense: Tensor) -> tuple[int, int]:
    """Number of elements and code of the dtype; for a dtype without a code, of the bytes."""
    movable = codes().movable
    code = movable.get(dense.dtype)
    if code is None:
        return dense.numel() * dense.itemsize, movable[torch.uint8]
    return dense.numel(), code


def shape_digest(tensor: Tensor) -> int:
    """A digest, the same in all processes, that almost always differs for different shapes with the
    same number of elements."""
    # 22 bits have room in a call of call.h. Hashes of integers are the same in all processes.
    return 0 if tensor.dim() == 1 else hash(tensor.shape) & 0x3FFFFF


def mark_changed(tensor: Tensor) -> None:
    """Tell autograd that ``tensor`` was changed in place, in case it was saved for backward."""
    _backend.load().mark_changed(tensor)


def check_root(src: int, world_size: int, name: str = "src") -> None:
    """Raise ValueError unless ``src`` is a rank, TypeError unless it is an integer."""
    check_integer(name, src)
    if not 0 <= src < world_size:
        raise ValueError(f"{name} must be a rank in 0..{world_size - 1}, got {src}")


def parts_of(dense: Tensor, sizes: Sequence[int] | None, ranks: int) -> Sequence[Tensor]:
    """The rows of ``dense`` for each of ``ranks``: ``sizes``, or equally many for ``None``.
    ValueError if the sizes do not add up to ``dense``."""
    rows = dense.shape[0]
    if sizes is None:
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"all_to_all over {ranks} ranks cuts {rows} rows into parts of {list(sizes)}; pass one "
            "size for each rank, whose sum is the number of rows"
        )
    parts: Sequence[Tensor] = dense.split(list(sizes))
    return parts


def check_has_rows(x: Tensor) -> None:
    """Raise ValueError unless ``x`` has a dimension."""
    if x.dim() == 0:
        raise ValueError("all_gather joins tensors along dimension 0, but x has none; use x[None]")


def check_rows(x: Tensor, world_size: int, dims: int = 1) -> None:
    """Raise ValueError unless ``x`` has ``dims`` dimensions, the first a multiple of the ranks."""
    if x.dim() < dims or x.shape[0] % world_size != 0:
        raise ValueError(
            f"reduce_scatter wants at least {dims} dimensions, the first of which it cuts into "
            f"{world_size} equal slices, but the input has shape {tuple(x.shape)}; pad it to a "
            f"multiple of {world_size} rows"
        )
