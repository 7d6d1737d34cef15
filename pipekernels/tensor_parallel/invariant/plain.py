"""The arithmetic of layers by default: products as they are, and sums in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.nn.utils import get_total_norm

from pipekernels.comm import Communicator
from pipekernels.ops.linear import compiled_linear, skinny_all_reduce, skinny_linear, wide_linear
from pipekernels.tensor_parallel.data_parallel import as_full_tensor
from pipekernels.tensor_parallel.functional import copy_to_ranks, row_linear


class ShardGradient(NamedTuple):
    """The gradient of this rank's shard of a parameter."""

    parameter: Tensor
    dim: int = 0  # That is sharded.
    blocks: Sequence[int] = ()  # How many features of each fused layer this rank has.
    counts: bool = True  # Whether this rank is the first that holds the shard.


class Plain:
    """How sharded layers compute: chosen in a layer's constructor, never an object.

    :class:`pipekernels.tensor_parallel.invariant.arithmetic.Invariant` has the same functions.
    """

    order: ClassVar[str] = "rank"
    """In which the sums of the ranks are added, see :meth:`pipekernels.Communicator.all_reduce`."""

    skinny_linear: ClassVar[Callable[..., Tensor | None]] = staticmethod(skinny_linear)
    skinny_all_reduce: ClassVar[Callable[..., Tensor | None]] = staticmethod(skinny_all_reduce)
    """Products of a few rows, to be tried first, as checks would take as long."""

    row_linear: ClassVar[Callable[..., Tensor]] = staticmethod(row_linear)

    @staticmethod
    def _check(*args: Any, **options: Any) -> None:
        """Raise ValueError unless the layer is supported; plain arithmetic supports every one."""

    check_row = check_column = _check
    check_activations = _check  # Of features that a column-parallel layer has sharded.
    check_shared = _check  # A module whose gradients, which all heads share, are to be summed.

    @staticmethod
    def can_shard(size: int) -> bool:
        """Whether a vocabulary of ``size`` can be sharded."""
        return True

    @staticmethod
    def gradient_sum(comm: Communicator) -> Callable[..., Tensor] | None:
        """A forward hook that sums the gradients of a module's parameters over the ranks; None if
        hooks of the parameters are to do it."""
        return None

    @staticmethod
    def column_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator, blocks: Sequence[int]
    ) -> Tensor:
        """``x @ weight.T + bias`` of this rank's output features, of which each fused layer has as
        many as ``blocks`` says."""
        y = skinny_linear(x, weight, bias)  # First: copy_to_ranks() would take as long.
        if y is None:
            y = compiled_linear(x, weight, bias)
        return wide_linear(copy_to_ranks(x, comm), weight, bias) if y is None else y

    @staticmethod
    def looked_up(rows: Tensor) -> Tensor:
        """What a rank adds to a lookup: its own rows, and zeros for those of its peers."""
        return rows

    @staticmethod
    def sum_of_features(x: Tensor, comm: Communicator) -> Tensor:
        """The sum over this rank's part of the last dimension."""
        return x.sum(-1)

    @staticmethod
    def norms(
        shards: Sequence[ShardGradient], norm_type: float, comm: Communicator | None
    ) -> Tensor:
        """Norms of parts of this rank's gradients, ``[parts]``, of which those of all ranks have
        the norm of all gradients."""
        grads = [
            shard.parameter.new_zeros(())
            if shard.parameter.grad is None or not shard.counts
            else shard.parameter.grad
            for shard in shards
        ]
        return as_full_tensor(get_total_norm(grads, norm_type))[None]
