"""Communication of an SPMD stage with its neighbours."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels.comm.codes import MOVABLE
from pipekernels.pipeline.spmd.axis import Axis

_DTYPES = {code: dtype for dtype, code in MOVABLE.items()}
_HEADER = 4 + 64  # Integers: those before the sizes, and as many sizes as torch's kernels support.


class Features(NamedTuple):
    """What a rank must know about tensors before it receives them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Features:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def check(self, result: Tensor) -> None:
        """ValueError if the receiver of ``result`` expects others."""
        found = Features.of(result)
        # The receiver sends gradients of all results, or of none.
        if found[:2] != self[:2] or found.requires_grad > self.requires_grad:
            raise ValueError(
                f"the module returned {found}, not {self}; every micro-batch must give the same"
            )


class Link:
    """Messages to and from a neighbouring stage: ``count`` results, later as many gradients the
    other way, all with these features.

    A receiver posts the receive of the next message before it works on the present one. So a rank
    that waits, for a message or for the end of its last send, waits for a neighbour's work on an
    earlier micro-batch, never for a rank that waits for it.
    """

    def __init__(self, axis: Axis, stage: int, count: int, features: Features) -> None:
        self.features = features
        self._axis = axis
        self._rank = axis.ranks[stage]
        self._count = count
        self._left = 0  # Number of messages to receive.
        self._coming: tuple[dist.Work, Tensor] | None = None
        self._sent: tuple[dist.Work, Tensor] | None = None

    def send(self, tensor: Tensor | None) -> None:
        """Send ``tensor``, or zeros, without waiting, except for the end of the previous send."""
        self.flush()
        # A copy, as a module may write its next result to the same memory.
        message = self.features.empty(self._axis.device)
        message.zero_() if tensor is None else message.copy_(tensor)
        self._sent = cast(dist.Work, dist.isend(message, self._rank, self._axis.group)), message

    def flush(self) -> None:
        """Wait for the end of the last send, and release its memory."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None

    def receive(self) -> Tensor:
        """The next message."""
        if self._coming is None:
            self._left = self._count
            self._post()
        assert self._coming is not None
        work, tensor = self._coming
        self._post()
        work.wait()
        return tensor

    def _post(self) -> None:
        self._coming = None
        if self._left:
            self._left -= 1
            tensor = self.features.empty(self._axis.device)
            work = dist.irecv(tensor, self._rank, self._axis.group)
            self._coming = cast(dist.Work, work), tensor


def link_to_next(axis: Axis, count: int, features: Features) -> Link:
    """Announce ``count`` results to the next stage, which calls :func:`link_to_previous`."""
    dist.send(_header(axis, features, count), axis.ranks[axis.stage + 1], axis.group)
    return Link(axis, axis.stage + 1, count, features)


def link_to_previous(axis: Axis, count: int) -> Link:
    """Wait for what the previous stage announces. ValueError if it is not ``count`` results."""
    header = _header(axis)
    dist.recv(header, axis.ranks[axis.stage - 1], axis.group)
    features, announced = _decoded(header)
    if announced != count:
        raise ValueError(
            f"num_microbatches is {count} on this stage and {announced} on the one before; pass "
            "the same on all ranks"
        )
    return Link(axis, axis.stage - 1, count, features)


def features_of_last(axis: Axis, output: Tensor | None) -> Features:
    """Those of the ``output`` that the last stage has; all ranks call this."""
    header = _header(axis, None if output is None else Features.of(output))
    dist.broadcast(header, axis.ranks[-1], axis.group)
    return _decoded(header)[0]


def _header(axis: Axis, features: Features | None = None, count: int = 1) -> Tensor:
    """Announces ``count`` tensors; an empty one is for receiving."""
    known: list[int] = []
    if features is not None:
        shape, dtype, requires_grad = features
        known = [count, MOVABLE[dtype], int(requires_grad), len(shape), *shape]
    return torch.tensor(known + [0] * (_HEADER - len(known)), device=axis.device)


def _decoded(header: Tensor) -> tuple[Features, int]:
    count, code, requires_grad, dims, *sizes = header.tolist()
    return Features(tuple(sizes[:dims]), _DTYPES[code], bool(requires_grad)), count
