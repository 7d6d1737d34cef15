"""The mesh dimension whose ranks hold the stages of an SPMD pipeline, and a stage's messages to and
from its neighbours there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._arguments import check_kind
from pipekernels._torch_private import enclosing_mesh
from pipekernels.comm.codes import codes
from pipekernels.device.streams import with_index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HEADER = 3 + 64  # Integers: those before the sizes, and as many sizes as torch's kernels support.


class Axis(NamedTuple):
    """The ranks along one mesh dimension that have this rank's coordinates in all others."""

    group: dist.ProcessGroup
    # Ranks in the default group, by stage. In `group` they may have another order.
    ranks: list[int]
    stage: int  # This rank's.
    is_last: bool
    device: torch.device


def axis_of(mesh: DeviceMesh | None, name: str) -> Axis:
    """The dimension ``name`` of ``mesh``, by default of the enclosing mesh. Errors as of
    ``execute_pipeline``."""
    from torch.distributed.device_mesh import DeviceMesh  # Slow to import.

    if mesh is None:
        try:
            mesh = enclosing_mesh()
        except RuntimeError:
            raise ValueError(
                "no device mesh is active; pass mesh= or call this inside `with mesh:`"
            ) from None
    check_kind("mesh", mesh, DeviceMesh, "a DeviceMesh")
    names = mesh.mesh_dim_names or ()
    if name not in names:
        raise ValueError(
            f"model_axis_name is {name!r}; it must be a dimension of the mesh, which has "
            f"{list(names)} (mesh_dim_names of init_device_mesh)"
        )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; call this on its ranks only"
        )
    along = zip(names, place, strict=True)
    ranks = mesh.mesh[tuple(slice(None) if dim == name else i for dim, i in along)].tolist()
    stage = mesh.get_local_rank(name)
    return Axis(
        group=mesh.get_group(name),
        ranks=ranks,
        stage=stage,
        is_last=stage == len(ranks) - 1,
        device=with_index(mesh.device_type),
    )


class Features(NamedTuple):
    """What a rank must know about tensors before it receives them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Features:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @classmethod
    def of_last(cls, axis: Axis, output: Tensor | None) -> Features:
        """Those of the ``output`` that the last stage has; all ranks call this."""
        header = _header(axis, None if output is None else cls.of(output))
        dist.broadcast(header, axis.ranks[-1], axis.group)
        return _decoded(header)[0]

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def check(self, result: Tensor) -> None:
        """ValueError if the receiver of ``result`` expects others."""
        found = Features.of(result)
        # The receiver sends gradients of all results, or of none.
        if found[:2] != self[:2] or found.requires_grad > self.requires_grad:
            raise ValueError(
                f"the module returned {found}, not {self}; every microbatch must give the same"
            )


class Link:
    """Messages to and from a neighbouring stage: ``count`` results, later as many gradients the
    other way, all with these features.

    A receiver posts the receive of the next message before it works on the present one. So a rank
    that waits, for a message or for the end of its last send, waits for a neighbour's work on an
    earlier microbatch, never for a rank that waits for it.
    """

    def __init__(self, axis: Axis, stage: int, count: int, features: Features) -> None:
        self.features = features
        self._axis = axis
        self._rank = axis.ranks[stage]
        self._count = count
        self._left = 0  # Of this pass, the number of messages to receive.
        self._receiving: tuple[Any, Tensor] | None = None  # Work of the next message, its memory.
        self._sending: tuple[Any, Tensor] | None = None  # Those of the last message sent.

    @classmethod
    def to_next(cls, axis: Axis, count: int, features: Features) -> Link:
        """Announce ``count`` results to the next stage, which calls :meth:`to_previous`."""
        dist.send(_header(axis, features, count), axis.ranks[axis.stage + 1], axis.group)
        return cls(axis, axis.stage + 1, count, features)

    @classmethod
    def to_previous(cls, axis: Axis, count: int) -> Link:
        """Wait for what the previous stage announces. ValueError if it is not ``count`` results."""
        header = _header(axis)
        dist.recv(header, axis.ranks[axis.stage - 1], axis.group)
        features, announced = _decoded(header)
        if announced != count:
            raise ValueError(
                f"num_microbatches is {count} on this stage and {announced} on the one before; "
                "pass the same on all ranks"
            )
        return cls(axis, axis.stage - 1, count, features)

    def send(self, tensor: Tensor | None) -> None:
        """Send ``tensor``, or zeros, without waiting, except for the end of the previous send."""
        self.flush()
        # A copy, as a module may write its next result to the same memory.
        message = self.features.empty(self._axis.device)
        message.zero_() if tensor is None else message.copy_(tensor)
        self._sending = dist.isend(message, self._rank, self._axis.group), message

    def flush(self) -> None:
        """Wait for the end of the last send, and release its memory."""
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None

    def receive(self) -> Tensor:
        """The next message."""
        # A message per microbatch. The first call of a pass, forward or backward, counts anew.
        work, tensor = self._receiving or self._post()
        self._left = (self._left or self._count) - 1
        self._receiving = self._post() if self._left else None
        work.wait()
        return tensor

    def _post(self) -> tuple[Any, Tensor]:
        tensor = self.features.empty(self._axis.device)
        return dist.irecv(tensor, self._rank, self._axis.group), tensor


def _header(axis: Axis, features: Features | None = None, count: int = 1) -> Tensor:
    """Announces ``count`` tensors; an empty one is for receiving."""
    known: list[int] = []
    if features is not None:
        known = [count, codes().movable[features.dtype], features.requires_grad, *features.shape]
    return torch.tensor(known + [-1] * (_HEADER - len(known)), device=axis.device)


def _decoded(header: Tensor) -> tuple[Features, int]:
    count, code, requires_grad, *sizes = header.tolist()
    shape = tuple(size for size in sizes if size >= 0)
    dtypes = {code: dtype for dtype, code in codes().movable.items()}
    return Features(shape, dtypes[code], bool(requires_grad)), count
