"""The mesh dimension whose ranks hold the stages of an SPMD pipeline, and a stage's messages to and
from its neighbours there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._arguments import check_kind
from pipekernels._torch_private import (
    enclosing_mesh,
    tree_flatten,
    treespec_dumps,
    treespec_loads,
)
from pipekernels.comm.messages import decode, encode
from pipekernels.device.streams import with_index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Axis(NamedTuple):
    """The ranks along one mesh dimension that have this rank's coordinates in all others."""

    group: dist.ProcessGroup
    # Ranks in the default group, by stage. In `group` they may have another order.
    ranks: list[int]
    stage: int  # This rank's.
    is_last: bool
    device: torch.device


def axis_of(mesh: DeviceMesh | None, name: str) -> Axis:
    """The dimension ``name`` of ``mesh``, by default of the enclosing mesh. Raises what
    ``execute_pipeline`` does."""
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


def opened(value: Any) -> tuple[list[Tensor], str]:
    """The tensors of what a module returns, and the layout of :func:`closed`."""
    if isinstance(value, Tensor):
        return [value], ""
    tensors, layout = tree_flatten(value)
    for tensor in tensors:
        wanted = "a tensor, or a tuple or dict of tensors"
        check_kind("what the module returns", tensor, Tensor, wanted)
    return tensors, treespec_dumps(layout)


def closed(tensors: Sequence[Tensor], layout: str) -> Any:
    """What :func:`opened` has opened, with ``tensors``."""
    return treespec_loads(layout).unflatten(tensors) if layout else tensors[0]


class Features(NamedTuple):
    """What a rank must know about a tensor before it receives it."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Features:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


class Parcel(NamedTuple):
    """What a rank must know about the values of a stage before it receives them."""

    microbatches: int
    layout: str
    features: list[Features]

    @classmethod
    def of(cls, microbatches: int, tensors: Sequence[Tensor], layout: str) -> Parcel:
        return cls(microbatches, layout, [Features.of(each) for each in tensors])

    @classmethod
    def of_last(cls, axis: Axis, parcel: Parcel | None) -> Parcel:
        """The ``parcel`` that the last stage has; all ranks call this."""
        root = axis.ranks[-1]
        return _told(axis, parcel, lambda header: dist.broadcast(header, root, axis.group))

    def check(self, other: Parcel) -> None:
        """ValueError if the receiver of ``other`` expects this."""
        # The receiver sends gradients of all results, or of none.
        pairs = list(zip(self.features, other.features, strict=False))
        differ: list[Any] = [
            (a, b) for a, b in pairs if a[:2] != b[:2] or b.requires_grad > a.requires_grad
        ]
        if self.layout != other.layout:
            differ.append((self, other))
        for wanted, found in differ:
            raise ValueError(
                f"the module returned {found}, not {wanted}; every microbatch must give the same"
            )


class Link:
    """Messages to and from a neighbouring stage: a value for each microbatch of ``parcel``, later
    as many gradients the other way.

    A receiver posts the receives of the next value before it works on the present one. So a rank
    that waits, for a message or for the end of its last send, waits for a neighbour's work on an
    earlier microbatch, never for a rank that waits for it.
    """

    def __init__(self, axis: Axis, stage: int, parcel: Parcel) -> None:
        self.parcel = parcel
        self._axis = axis
        self._rank = axis.ranks[stage]
        self._left = 0  # Of this pass, the number of values to receive.
        self._receiving: list[tuple[Any, Tensor]] = []  # Works of the next value, their memory.
        self._sending: list[tuple[Any, Tensor]] = []  # As many of the last value sent.

    @classmethod
    def to_next(cls, axis: Axis, parcel: Parcel) -> Link:
        """Announce results to the next stage, which calls :meth:`to_previous`."""
        following = axis.ranks[axis.stage + 1]
        _told(axis, parcel, lambda header: dist.send(header, following, axis.group))
        return cls(axis, axis.stage + 1, parcel)

    @classmethod
    def to_previous(cls, axis: Axis, count: int) -> Link:
        """Wait for what the previous stage announces. ValueError if it is not ``count`` results."""
        previous = axis.ranks[axis.stage - 1]
        parcel = _told(axis, None, lambda header: dist.recv(header, previous, axis.group))
        if parcel.microbatches != count:
            raise ValueError(
                f"num_microbatches is {count} on this stage and {parcel.microbatches} on the one "
                "before; pass the same on all ranks"
            )
        return cls(axis, axis.stage - 1, parcel)

    @property
    def differentiable(self) -> list[Features]:
        return [each for each in self.parcel.features if each.requires_grad]

    def send(self, tensors: Sequence[Tensor | None], features: Sequence[Features]) -> None:
        """Send ``tensors``, zeros for None, without waiting, except for the end of the previous
        send."""
        self.flush()
        for tensor, each in zip(tensors, features, strict=True):
            # A copy, as a module may write its next result to the same memory.
            message = each.empty(self._axis.device)
            message.zero_() if tensor is None else message.copy_(tensor)
            work = dist.isend(message, self._rank, self._axis.group)
            self._sending.append((work, message))

    def flush(self) -> None:
        """Wait for the end of the last send, and release its memory."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def receive(self, features: Sequence[Features]) -> list[Tensor]:
        """The next value: all results have the same ``features``, and all gradients."""
        # The first call of a pass, forward or backward, counts anew.
        works = self._receiving or self._post(features)
        self._left = (self._left or self.parcel.microbatches) - 1
        self._receiving = self._post(features) if self._left else []
        for work, _ in works:
            work.wait()
        return [tensor for _, tensor in works]

    def _post(self, features: Sequence[Features]) -> list[tuple[Any, Tensor]]:
        tensors = [each.empty(self._axis.device) for each in features]
        return [(dist.irecv(each, self._rank, self._axis.group), each) for each in tensors]


def _told(axis: Axis, parcel: Parcel | None, pass_on: Callable[[Tensor], Any]) -> Parcel:
    """The parcel that ``pass_on``, which sends or receives a tensor, brings; None receives it."""
    data = b"" if parcel is None else encode(parcel)
    size = torch.tensor([len(data)], device=axis.device)
    pass_on(size)
    message = torch.tensor(list(data or bytes(int(size))), dtype=torch.uint8, device=axis.device)
    pass_on(message)
    return decode(bytes(message.tolist()), "a stage", Parcel)
