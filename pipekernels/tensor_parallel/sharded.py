"""The base of layers whose parameters are sharded over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind
from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.data_parallel import as_full_tensor, distributed_like
from pipekernels.tensor_parallel.full_layer import REMEDY
from pipekernels.tensor_parallel.functional import Heads, gather_from_ranks, shard_spans, shares
from pipekernels.tensor_parallel.integer_matrix import IntegerMatrix


class ShardedLayer(nn.Module):
    """Shards the parameters of a full layer and gathers them.

    Attributes:
        comm: whose ranks hold the layer.
        blocks: sizes of the layers that are fused, each sharded by itself.
        heads: which stay whole (:func:`shard_spans`).
        invariant: the same bits on 1, 2, 4 and 8 ranks.
        rank, world_size: of the communicator.
        shards: for each rank, the number of its shard; several ranks may hold the same.
        name: of the layer in its model, for errors.
        is_transposed: whether the full layer's matrices are ``[in, out]``.
        integers: of parameters that are integers, their scales and their zeros, the matrix.
        float_dtype: of the matrices that the integers stand for.
    """

    # Parameter name -> its sharded dimension in the full layer; others are replicated.
    shard_dims: Mapping[str, int]
    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    matrices: Sequence[str] = ()  # Parameters that can be integers.

    def __init__(
        self,
        comm: Communicator,
        blocks: Sequence[int] = (),
        heads: Heads | None = None,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(comm, Communicator):
            raise TypeError(
                f"comm must be a pipekernels.Communicator, got {type(comm).__name__}; make one "
                "with Communicator.from_process_group(group) or Communicator.threads(world_size)"
            )
        self.comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.name: str | None = None
        self.blocks = tuple(blocks)
        self.heads = heads
        self.shards = list(range(comm.world_size))
        if heads is not None:
            spans = shard_spans(heads[0], comm.world_size, heads)
            self.shards = list(map(sorted(set(spans)).index, spans))
        self.invariant = invariant
        self.is_transposed = False
        self.integers: Mapping[str, IntegerMatrix] = {}
        self.float_dtype = torch.float32
        self._full_shapes: dict[str, tuple[int, ...]] = {}  # By names of parameters.

    @property
    def _keeps_transposed(self) -> bool:
        """Whether the matrices are ``[in, out]`` here: matrices of integers never are."""
        return self.is_transposed and not self.integers

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the parameter ``name`` of the full layer has."""
        return self._full_shapes[name]

    def _new_full(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        """A new full layer."""
        raise NotImplementedError

    def to_full(self) -> nn.Module:
        """The full layer, gathered. A collective; TypeError as for :meth:`full_state_dict`."""
        full = self._new_full(torch.device("meta"))
        for name, parameter in self._full_parameters().items():
            full.register_parameter(name, parameter)
        return full.train(self.training)

    def _full_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the full layer, gathered."""
        state = self.full_state_dict()
        for matrix in dict.fromkeys(self.integers.values()):
            floats = matrix.floats(state, self.float_dtype)
            state[matrix.weight] = floats.mT.contiguous() if self.is_transposed else floats
        return {
            name: nn.Parameter(full, requires_grad=self.get_parameter(name).requires_grad)
            for name, full in state.items()
        }

    def reset_parameters(self) -> None:
        """Initialise as the full layer does, which every rank allocates meanwhile. The same seed on
        every rank gives the same layer for any world size. TypeError if weights are integers."""
        if self.integers:
            raise TypeError(
                f"{self._described()} has weights of integers, which are made from floats"
            )
        parameters = self._plain_parameters()
        first = next(iter(parameters.values()))
        full = self._new_full(first.device, first.dtype)
        with torch.no_grad():
            for name, parameter in parameters.items():
                part = self.shard(name, full.get_parameter(name))
                parameter.copy_(distributed_like(parameter, part))

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state_dict of the full layer, gathered; a collective. TypeError if a parametrization
        or a mask has replaced a parameter."""
        return {
            name: self.gather(name, parameter.detach())
            if name in self.shard_dims
            else as_full_tensor(parameter.detach()).clone()
            for name, parameter in self._plain_parameters().items()
        }

    def gather(self, name: str, part: Tensor) -> Tensor:
        """The full tensor, joined from each rank's ``part``, sharded like parameter ``name``."""
        matrix = self.integers.get(name)
        if matrix is not None:
            part = matrix.unpack(name, part)
            if matrix.is_replicated(name):
                return part
        dim = self.shard_dim(name)
        blocks, heads = self._layout(name)
        own = [size for _, size in self.spans(name)]
        parts = as_full_tensor(part).movedim(dim, -1).split(own, -1)
        joined: list[Tensor] = []
        for own_part, size in zip(parts, blocks, strict=True):
            sizes = shares(size, self.world_size, heads)
            by_rank = gather_from_ranks(own_part, self.comm, sizes).split(sizes, -1)
            joined += dict(zip(self.shards, by_rank, strict=True)).values()  # Of each shard, one.
        return torch.cat(joined, -1).movedim(-1, dim).contiguous()

    def shard(self, name: str, full: Tensor) -> Tensor:
        """A copy of this rank's shard of the full parameter ``name``."""
        return self._part(name, full).clone(memory_format=torch.contiguous_format)

    def _part(self, name: str, full: Any) -> Tensor:
        """:meth:`shard`, perhaps a view, of a tensor or of safetensors' slice of one, of which only
        this part is read."""
        matrix = self.integers.get(name)
        part: Tensor
        if name not in self.shard_dims or (matrix is not None and matrix.is_replicated(name)):
            part = full[...]
        else:
            dim = self.shard_dim(name)
            spans = [slice(start, start + size) for start, size in self.spans(name)]
            parts = [full[(slice(None),) * dim + (span,)] for span in spans]
            part = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return part if matrix is None else matrix.pack(name, part)

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Where this rank's shard of parameter ``name`` lies in the full one: start and size along
        the sharded dimension, one for each of ``blocks``."""
        blocks, heads = self._layout(name)
        spans = []
        for offset, block in zip(accumulate(blocks, initial=0), blocks, strict=False):
            start, size = shard_spans(block, self.world_size, heads)[self.rank]
            spans.append((offset + start, size))
        return spans

    def _layout(self, name: str) -> tuple[Sequence[int], Heads | None]:
        """Sizes of the parts of parameter ``name`` that are each sharded, and heads in them."""
        return self.blocks or (self.full_shape(name)[self.shard_dim(name)],), self.heads

    def shard_dim(self, name: str) -> int:
        """The sharded dimension of parameter ``name``."""
        return self.shard_dims[name]

    def _plain_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name. TypeError if one is parametrized."""
        for name in self.parameter_names:
            if name not in self._parameters:
                raise TypeError(
                    f"the {name} of this {type(self).__name__} is computed from parameters that "
                    f"are not known to be shards of a full layer's; {REMEDY}"
                )
        return {name: p for name, p in self._parameters.items() if p is not None}

    def _adopt(self, full: Mapping[str, Tensor | None]) -> None:
        """Take this rank's shards of the parameters of a full layer."""
        for name, parameter in full.items():
            if parameter is not None:
                self._full_shapes[name] = tuple(parameter.shape)
                shard = self.shard(name, parameter.detach())
                parameter = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            self.register_parameter(name, parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Scales of integers keep their dtype.
        names = [matrix.scale for matrix in dict.fromkeys(self.integers.values())]
        scales = {name: self.get_parameter(name).data for name in names}
        super()._apply(fn, recurse)
        if scales:
            self.float_dtype = fn(torch.empty(0, dtype=self.float_dtype)).dtype
        for name, scale in scales.items():
            parameter = self.get_parameter(name)
            if parameter.dtype != scale.dtype:
                parameter.data = scale.to(parameter.device)
        return self

    def _described(self) -> str:
        """Class and name, for errors."""
        return type(self).__name__ + (f" {self.name!r}" if self.name else "")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Replacing entries is safe: load_state_dict gives every module its own dict.
        for name in self.shard_dims.keys() & self._full_shapes.keys():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and tuple(value.shape) == self.full_shape(name):
                state_dict[prefix + name] = self.shard(name, value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


ShardKey: TypeAlias = tuple[ShardedLayer, str]  # A parameter's layer, and its name there.


def sharded_layers(module: nn.Module) -> list[ShardedLayer]:
    """The sharded layers in ``module``, itself included."""
    check_kind("the model", module, nn.Module, "an nn.Module")
    return [layer for layer in module.modules() if isinstance(layer, ShardedLayer)]


def sharded_parameters(module: nn.Module) -> dict[Tensor, ShardKey]:
    """The sharded parameters of ``module``. TypeError if one has a parametrization or a mask."""
    return {
        parameter: (layer, name)
        for layer in sharded_layers(module)
        for name, parameter in layer._plain_parameters().items()
        if name in layer.shard_dims
    }
