"""The words of a plan: what may become of a module."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.arithmetic import arithmetic_of
from pipekernels.tensor_parallel.attention import ParallelMultiheadAttention
from pipekernels.tensor_parallel.embedding import VocabParallelEmbedding
from pipekernels.tensor_parallel.full_layer import features_of
from pipekernels.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pipekernels.tensor_parallel.sharded import ShardedLayer

ATTENTION = "attention"
COLUMN = "column"
GATHERED = "column_gather_output"
EMBEDDING = "embedding"
PACKED = "packed_column"
SHARED = "shared_column"
SUMMED = "replicated_with_grad_allreduce"
SPLIT = "split_output"
ALIBI = "split_alibi"

# Sharded linear layers: class and arguments.
_LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    COLUMN: (ColumnParallelLinear, {}),
    GATHERED: (ColumnParallelLinear, {"gather_output": True}),
    PACKED: (ColumnParallelLinear, {}),
    SHARED: (ColumnParallelLinear, {}),
    "row": (RowParallelLinear, {}),
    "row_split_input": (RowParallelLinear, {"input_is_parallel": False}),
}
NOT_REPLACED = (SUMMED, SPLIT, ALIBI)
"""Kinds of modules that are not replaced."""
KINDS = (*_LAYERS, EMBEDDING, ATTENTION, *NOT_REPLACED)
SHARDED_ROWS = (COLUMN, GATHERED, EMBEDDING)
"""Kinds that shard the first dimension of a weight alike, so that layers can share it."""

# transformers' words.
_ALIASES = {
    "colwise": COLUMN,
    "colwise_gather_output": GATHERED,
    "embedding_rowwise": EMBEDDING,
    "packed_colwise": PACKED,
    "rowwise": "row",
    "rowwise_split_input": "row_split_input",
}


def canonical(word: Any) -> Any:
    """The kind that ``word`` names, in our words."""
    if not isinstance(word, str):
        return word
    name, colon, blocks = word.partition(":")
    return _ALIASES.get(name, name) + colon + blocks


def is_known(kind: Any) -> bool:
    """Whether a plan may name the :func:`canonical` ``kind``."""
    if not isinstance(kind, str):
        return False
    name, colon, sizes = kind.partition(":")
    if not colon:
        return name in KINDS and name != SHARED
    numbers = [int(size) if size.isdecimal() else 0 for size in sizes.split(",")]
    return all(numbers) and (name == PACKED or (name == SHARED and len(numbers) == 1))


def shard(
    layer: nn.Module, name: str, kind: str, comm: Communicator, *, invariant: bool
) -> ShardedLayer:
    """This rank's shard of ``layer``.

    Raises:
        TypeError: it has what a sharded layer would lose.
        ValueError: it has too few features, or not those of ``kind``.
    """
    result: ShardedLayer
    arithmetic = arithmetic_of(invariant)
    try:
        if kind == EMBEDDING:
            assert isinstance(layer, nn.Embedding)
            result = VocabParallelEmbedding.from_embedding(layer, comm, invariant=invariant)
        elif kind == ATTENTION:
            assert isinstance(layer, nn.MultiheadAttention)
            arithmetic.check_attention()
            result = ParallelMultiheadAttention(layer, comm)
            result.out_proj.name = f"{name}.out_proj"
        else:
            sharded, arguments = _LAYERS[kind.partition(":")[0]]
            if kind.startswith(PACKED):
                arguments = {"blocks": block_sizes(kind, features_of(layer)[1])}
                arithmetic.check_activations(arguments["blocks"])
            elif kind == COLUMN:
                arithmetic.check_activations([features_of(layer)[1]])
            if kind.startswith(SHARED):
                arguments = {"copies": int(kind.partition(":")[2])}
            result = sharded.from_linear(layer, comm, invariant=invariant, **arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name!r} cannot be made {kind!r}: {error}") from error
    result.name = name
    return result


def block_sizes(kind: str, out_features: int) -> list[int]:
    """Sizes of the blocks of a packed layer: ``packed_column`` has two equal ones,
    ``packed_column:3`` three, ``packed_column:64,16,16`` those."""
    sizes = [int(size) for size in kind.partition(":")[2].split(",") if size] or [2]
    if len(sizes) > 1:
        return sizes
    if out_features % sizes[0]:
        raise ValueError(f"{out_features} features are no {sizes[0]} equal blocks")
    return [out_features // sizes[0]] * sizes[0]
