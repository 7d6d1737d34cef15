"""The forward of any module, run micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipekernels.local_ops.micro_batch import micro_batch_sizes
from pipekernels.pipeline.stage.batchnorm import committed
from pipekernels.pipeline.values.micro_batch import deny_constant
from pipekernels.pipeline.values.nested import leaves, map_leaves
from pipekernels.pipeline.values.structure import NoChunk

DEPTH = 4
"""How deep the attributes of other objects than containers, as of caches, are searched."""


def forward_in_chunks(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    chunks: int,
    dim: int = 0,
    order: Sequence[str] = (),
) -> Any:
    """``forward(*args, **kwargs)``, computed by ``min(chunks, batch)`` calls on micro-batches, in
    order, on the calling thread. :func:`parallelize_pipeline` says what is split and joined.

    Args:
        module: the module of ``forward``; its DeferredBatchNorms commit once.
        forward: called once if there is one micro-batch, or no tensor to split.
        args: positional arguments.
        kwargs: keyword arguments.
        chunks: the most micro-batches; their sizes differ by at most one.
        dim: the batch dimension.
        order: names of keyword arguments to consider first, in the order of the signature.

    Raises:
        TypeError: an argument has tensors, perhaps only after a micro-batch, but is neither a
            tensor nor a known container.
        ValueError: results that cannot be joined.
    """
    inputs = (tuple(args), {name: kwargs[name] for name in order if name in kwargs} | dict(kwargs))
    found = leaves(inputs)
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.dim() > dim]
    batch = tensors[0].size(dim) if tensors else 0
    sizes = micro_batch_sizes(batch, chunks)
    with committed([module]):
        if len(sizes) == 1:
            whole_args, whole_kwargs = unwrap_no_chunk(module, *inputs)
            return forward(*whole_args, **whole_kwargs)
        # One split per tensor object: attention layers check whether query and key are identical.
        parts = {id(t): t.split(sizes, dim) for t in tensors if t.size(dim) == batch}
        results = []
        for m in range(len(sizes)):
            for leaf in found:
                _deny_opaque(leaf)
            part_args, part_kwargs = _micro_batch(inputs, parts, m)
            results.append(forward(*part_args, **part_kwargs))
    return map_leaves(lambda *pieces: _join(pieces, sizes, dim), *results)


def unwrap_no_chunk(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A hook before the forward: unsplit arguments, with the tensors of ``NoChunk`` objects."""
    return _micro_batch((args, kwargs), {}, 0)


def _micro_batch(inputs: Any, parts: Mapping[int, Sequence[torch.Tensor]], m: int) -> Any:
    def part(leaf: Any) -> Any:
        if isinstance(leaf, NoChunk):
            return leaf.tensor
        return parts[id(leaf)][m] if id(leaf) in parts else leaf

    return map_leaves(part, inputs)


def _deny_opaque(leaf: Any) -> None:
    if isinstance(leaf, (torch.Tensor, NoChunk, nn.Module)):
        return
    if hasattr(leaf, "to") or _holds_tensors(leaf, DEPTH):
        raise TypeError(
            f"an argument of type {type(leaf).__name__} cannot be split into micro-batches; pass "
            "its tensors, in tuples, lists, dicts or dataclasses, or use chunks=1"
        )


def _holds_tensors(value: Any, depth: int) -> bool:
    """Whether an object, such as a key-value cache, has tensors among its attributes, or down to
    ``depth`` levels in theirs."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    return any(
        _holds_tensors(inner, depth - 1)
        for attribute in vars(value).values()
        for inner in leaves(attribute)
    )


def _join(pieces: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    """One value from those that the micro-batches returned at one place."""
    first = pieces[0]
    if all(piece is first for piece in pieces):
        return first
    if all(isinstance(piece, torch.Tensor) for piece in pieces):
        return _concatenated(pieces, sizes, dim)
    comparable = isinstance(first, Hashable) and not isinstance(first, torch.Tensor)
    if comparable and all(type(piece) is type(first) and piece == first for piece in pieces):
        return first
    types = ", ".join(sorted({type(piece).__name__ for piece in pieces}))
    raise ValueError(
        f"the module's results cannot be joined: its micro-batches returned different objects of "
        f"type {types} at the same place; return tensors, or the same object for all micro-batches "
        "(a cache can often be switched off, as by use_cache=False)"
    )


def _concatenated(pieces: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> torch.Tensor:
    first = pieces[0]
    rows = first.size(dim) // sizes[0] if first.dim() > dim else 0
    for piece, size in zip(pieces, sizes, strict=True):
        shape = list(first.shape)
        if rows:
            shape[dim] = rows * size
        if not rows or list(piece.shape) != shape:
            raise ValueError(
                f"the module returned tensors of shapes {[list(p.shape) for p in pieces]} for "
                f"micro-batches of sizes {list(sizes)}; they are joined along dimension {dim}, "
                "which must equal the micro-batch's rows or a common multiple of them, and the "
                "other dimensions must be equal (take the mean over the batch, as in a loss, "
                "outside the module)"
            )
    deny_constant(pieces, sizes, dim)
    return torch.cat(list(pieces), dim)
