"""The forward of any module, run micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipekernels.local_ops.micro_batch import micro_batch_sizes
from pipekernels.pipeline.stage.batchnorm import committed
from pipekernels.pipeline.values.micro_batch import Gather
from pipekernels.pipeline.values.nested import flattened, leaves, map_leaves
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
    order, on the calling thread, or by one without a tensor to split; then the
    DeferredBatchNorms of ``module`` commit. The guide to device maps says what is split along
    ``dim``, and joined. Keyword arguments are considered in this ``order``, then all others.

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
        # Not a Scatter, whose views are detached, also from forward mode and torch.func. One split
        # per tensor object: attention layers check whether query and key are identical.
        parts = {id(t): t.split(sizes, dim) for t in tensors if t.size(dim) == batch}
        results = []
        for m in range(len(sizes)):
            for leaf in found:
                _deny_opaque(leaf)
            part_args, part_kwargs = _micro_batch(inputs, parts, m)
            results.append(forward(*part_args, **part_kwargs))
    return _joined(results, sizes, dim)


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
    return any(_holds_tensors(inner, depth - 1) for inner in leaves(vars(value)))


def _joined(results: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    """One value from those that the micro-batches returned."""
    rows: list[list[Any]] = [[] for _ in results]
    first, *others = [flattened(result, row) for result, row in zip(results, rows, strict=True)]
    if any(layout != first for layout in others):
        raise ValueError(
            f"the module's results cannot be joined: it returned {[len(row) for row in rows]} "
            "values for its micro-batches, or put them together in another way; return the same "
            "containers, with the same keys, for all"
        )
    joined = iter([_join(pieces, sizes, dim) for pieces in zip(*rows, strict=True)])
    return map_leaves(lambda _: next(joined), results[0])


def _join(pieces: tuple[Any, ...], sizes: Sequence[int], dim: int) -> Any:
    """One value from those at the same place of the results."""
    first = pieces[0]
    if all(piece is first for piece in pieces):
        return first
    if all(isinstance(piece, torch.Tensor) and piece.dim() > dim for piece in pieces):
        gather = Gather(sizes, dim, "the module")
        for m, piece in enumerate(pieces):
            gather.check(m, piece)
        return torch.cat(pieces, dim)  # In the graph, where a Gather would copy.
    comparable = isinstance(first, Hashable) and not isinstance(first, torch.Tensor)
    if comparable and all(type(piece) is type(first) and piece == first for piece in pieces):
        return first
    types = ", ".join(sorted({type(piece).__name__ for piece in pieces}))
    raise ValueError(
        f"the module's results cannot be joined: its micro-batches returned different objects of "
        f"type {types} at the same place; return tensors with their rows (and take the mean over "
        "these, as in a loss, outside the module), or the same object for all micro-batches (a "
        "cache can often be switched off, as by use_cache=False)"
    )
