"""The kinds of a plan: how modules are changed.

A kind knows which modules it takes, how it shards or changes them, and what the ranks exchange. A
new one is an instance in ``KINDS``, perhaps of a new class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.attention import ParallelMultiheadAttention
from pipekernels.tensor_parallel.embedding import VocabParallelEmbedding
from pipekernels.tensor_parallel.experts import ParallelExperts
from pipekernels.tensor_parallel.full_layer import (
    features_of,
    is_embedding,
    is_experts,
    linear_classes,
    note_hook,
)
from pipekernels.tensor_parallel.functional import Heads, copy_to_ranks, shard_spans
from pipekernels.tensor_parallel.invariant.slabs import check_width
from pipekernels.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pipekernels.tensor_parallel.partial_gradients import (
    split_output,
    split_parameters,
    sum_gradients,
)


@dataclass(frozen=True)
class Kind:
    """How a module is changed."""

    word: str
    """Its name in a plan."""


@dataclass(frozen=True)
class HookKind(Kind):
    """Modules of any class, which are kept and get hooks."""

    add_hooks: Callable[..., None]
    """``add_hooks(module, comm, invariant)``; with ``heads=`` too if in ``_CUT_BY_HEADS``."""


@dataclass(frozen=True)
class LayerKind(Kind):
    """Layers that sharded layers replace."""

    make: Callable[..., Any]
    """``make(layer, comm, **options)`` makes this rank's shard, with the options ``invariant``,
    ``heads`` and ``blocks`` that apply. It raises a TypeError if the layer has what a shard would
    lose, a ValueError if its features cannot be cut like this."""
    sent: tuple[str, str]
    """What the ranks exchange in the forward and the backward, in elements per token: ``{0}`` and
    ``{1}`` for the sizes of the weight, ``[out, in]`` or ``[experts, out, in]``."""
    takes: str = "nn.Linear"
    accepts: Callable[[nn.Module], bool] = lambda layer: type(layer) in linear_classes()
    cuts_input: bool = False
    can_tie: bool = False
    """Whether layers of such kinds can share a weight, whose first dimension they cut."""
    is_of_vocabulary: bool = False
    has_partner: bool = False
    """Whether a row-parallel layer takes the output, perhaps after an activation."""
    blocks: tuple[int, ...] = (1,)
    """Sizes of the blocks of output features, each of which is cut; one number: so many equal
    blocks."""
    heads: Heads | None = None
    """Which stay whole."""
    checks_extras: bool = False
    """Whether ``make`` looks itself for what would be lost, such as hooks."""
    not_invariant: str = ""
    """What ``invariant=True`` does not support, and a remedy; empty if it supports all."""

    def shard(self, layer: nn.Module, comm: Communicator, *, invariant: bool) -> Any:
        """This rank's shard of ``layer``; raises what ``make`` raises."""
        if invariant and self.not_invariant:
            raise ValueError(f"invariant=True does not support {self.not_invariant}")
        if invariant and self.has_partner:  # An activation may follow.
            check_width(self._sizes(layer))
        options: dict[str, Any] = {"invariant": True} if invariant else {}
        if self.heads is not None:
            options["heads"] = self.heads
        if self.blocks != (1,):
            options["blocks"] = self._sizes(layer)
        return self.make(layer, comm, **options)

    def _sizes(self, layer: nn.Module) -> list[int]:
        if len(self.blocks) > 1:
            return list(self.blocks)
        out_features, (count,) = features_of(layer)[1], self.blocks
        if out_features % count:
            raise ValueError(f"{out_features} features cannot be cut into {count} equal blocks")
        return [out_features // count] * count


def _split_alibi(
    module: nn.Module, comm: Communicator, invariant: bool, heads: Heads | None = None
) -> None:
    """Cut the argument ``alibi`` of ``module``, ``[batch * heads, ...]``, down to the heads of this
    rank. The attribute ``num_heads`` of ``module`` is their number."""

    # A function: deepcopy leaves it as it is, so a copied model shares the communicator.
    def split(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        count = module.num_heads * comm.world_size if heads is None else heads[0]
        every = copy_to_ranks(kwargs["alibi"], comm).unflatten(0, (-1, count))
        own = every.narrow(1, *shard_spans(count, comm.world_size, heads)[comm.rank])
        return args, kwargs | {"alibi": own.flatten(0, 1)}

    note_hook(module, module.register_forward_pre_hook(split, with_kwargs=True))


def _sum_last(features: int) -> Callable[[nn.Module, Communicator, bool], None]:
    """Hooks on a whole layer whose last output features each rank uses for its own heads, without
    another layer between: their gradients are summed."""

    def add(module: nn.Module, comm: Communicator, invariant: bool) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            first, last = output.split([output.shape[-1] - features, features], -1)
            return torch.cat([first, copy_to_ranks(last, comm)], -1)

        note_hook(module, module.register_forward_hook(hook))

    return add


_IN, _OUT = "all-reduce {1}", "all-reduce {0}"
_column, _row = ColumnParallelLinear.from_linear, RowParallelLinear.from_linear
_split = partial(_row, input_is_parallel=False)
COLUMN = LayerKind("column", _column, ("", _IN), can_tie=True, has_partner=True)
GATHERED = LayerKind(
    "column_gather_output",
    partial(_column, gather_output=True),
    ("all-gather {0}", _IN),
    can_tie=True,
    is_of_vocabulary=True,
)
PACKED = LayerKind("packed_column", _column, ("", _IN), has_partner=True, blocks=(2,))
ROW = LayerKind("row", _row, (_OUT, ""), cuts_input=True)
EMBEDDING = LayerKind(
    "embedding",
    VocabParallelEmbedding.from_embedding,
    (_IN, ""),
    takes="nn.Embedding",
    accepts=is_embedding,
    can_tie=True,
    is_of_vocabulary=True,
)
ATTENTION = LayerKind(
    "attention",
    ParallelMultiheadAttention,
    (_IN, _IN),
    takes="nn.MultiheadAttention",
    accepts=lambda layer: type(layer) is nn.MultiheadAttention,
    checks_extras=True,
    not_invariant=(
        "nn.MultiheadAttention; leave it whole, or use attention with separate linear layers"
    ),
)
EXPERTS = LayerKind(
    "experts",
    ParallelExperts,
    (_IN, f"{_IN} and routing weights"),  # {1}: the output features, after the experts.
    takes="a module of stacked experts",
    accepts=is_experts,
    checks_extras=True,
    not_invariant=(
        "experts, whose products have other bits for other numbers of tokens; leave them whole"
    ),
)
SUMMED = HookKind("replicated_with_grad_allreduce", sum_gradients)
_ALL: tuple[Kind, ...] = (
    COLUMN,
    GATHERED,
    PACKED,
    ROW,
    replace(ROW, word="row_split_input", make=_split, sent=(_OUT, "all-gather {1}")),
    EMBEDDING,
    ATTENTION,
    EXPERTS,
    replace(EXPERTS, word="expert_parallel", make=partial(ParallelExperts, expert_parallel=True)),
    SUMMED,
    HookKind("split_output", split_output),
    HookKind("split_alibi", _split_alibi),
    HookKind("split_parameters", split_parameters),
)
KINDS = {kind.word: kind for kind in _ALL}

# Names to which a plan may add sizes, ``name:size,size``, and the kinds of these; None for others.
SIZED_KINDS: dict[str, Callable[[str, tuple[int, ...]], Kind | None]] = {
    "packed_column": lambda word, sizes: replace(PACKED, word=word, blocks=sizes),
    "sum_last_gradients": lambda word, sizes: (
        HookKind(word, _sum_last(sizes[0])) if len(sizes) == 1 else None
    ),
}
_CUT_BY_HEADS = (
    "column", "packed_column", "row", "split_alibi", "split_output", "split_parameters",
)  # fmt: skip

_OF_TRANSFORMERS = {  # Its words for our kinds.
    "colwise": "column",
    "colwise_gather_output": "column_gather_output",
    "embedding_rowwise": "embedding",
    "ep_dispatch_experts": "expert_parallel",
    "local_params": "split_parameters",
    "mla_kv_a_proj": "sum_last_gradients",
    "moe_tp_experts": "experts",
    "packed_colwise": "packed_column",
    "rowwise": "row",
    "rowwise_split_input": "row_split_input",
}


def parse(word: Any) -> Kind | None:
    """The kind that ``word``, ``name[:size,...][/heads/key heads]``, names here or in transformers;
    None if it names none."""
    if not isinstance(word, str):
        return None
    sized, *heads = word.split("/")
    name, colon, given = sized.partition(":")
    name = _OF_TRANSFORMERS.get(name, name)
    kind = KINDS.get(name)
    if colon:
        sizes = tuple(int(size) if size.isdecimal() else 0 for size in given.split(","))
        is_valid = name in SIZED_KINDS and all(sizes)
        kind = SIZED_KINDS[name](f"{name}:{given}", sizes) if is_valid else None
    if not heads or kind is None:
        return kind
    counts = [int(number) for number in heads if number.isdecimal()]
    return of_heads(kind, (counts[0], counts[1])) if len(counts) == len(heads) == 2 else None


def of_heads(kind: Kind, heads: Heads) -> Kind | None:
    """``kind`` with heads that stay whole; None if it is not one that cuts heads apart."""
    if kind.word.partition(":")[0] not in _CUT_BY_HEADS:
        return None
    word = f"{kind.word}/{heads[0]}/{heads[1]}"
    if isinstance(kind, HookKind):
        return replace(kind, word=word, add_hooks=partial(kind.add_hooks, heads=heads))
    return replace(kind, word=word, heads=heads) if isinstance(kind, LayerKind) else None


def kinds_by_name(
    model: nn.Module, patterns: Mapping[str, Kind]
) -> tuple[dict[str, Kind], set[str]]:
    """The kind of each module's name that ``patterns`` match, and the patterns that match none.

    Raises:
        ValueError: patterns give a name different kinds.
    """
    kinds: dict[str, Kind] = {}
    unused = set(patterns)
    for name, _ in model.named_modules(remove_duplicate=False):
        for pattern, kind in patterns.items():
            if fnmatchcase(name, pattern):
                unused.discard(pattern)
                known = kinds.setdefault(name, kind)
                if known != kind:
                    raise ValueError(
                        f"the plan makes {name!r} both {known.word!r} and {kind.word!r}"
                    )
    return kinds, unused
