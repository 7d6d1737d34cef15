"""The messages of the backend: what torch calls point-to-point."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipekernels import _backend
from pipekernels._torch_private import (
    disable_dynamo,
    dispatch_mode_count,
    is_profiler_enabled,
    is_seen,
)
from pipekernels.comm.tensors import put_back, to_dense, to_dense_in_place


class MessageWork(dist.Work):
    """A message in progress.

    Args:
        message: the message.
        dense: the tensor whose memory it uses.
        result: the tensor that gets the values of ``dense`` at the end; None for a send.
        dropped: where the message goes, with its memory, if the caller drops this work earlier.
    """

    def __init__(
        self,
        message: _backend.Message,
        dense: Tensor,
        result: Tensor | None,
        dropped: list[tuple[_backend.Message, Tensor]],
    ) -> None:
        super().__init__()
        self._message = message
        self._dense = dense
        self._result = result
        self._dropped = dropped

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the message; raise its error. A timeout of 0 means the group's."""
        if not self._message.wait(timeout.total_seconds() or None):
            raise TimeoutError(f"the message has not ended within {timeout}")
        self._conclude()
        return True

    def is_completed(self) -> bool:
        if not self._message.is_done():
            return False
        self._conclude()
        return True

    def _conclude(self) -> None:
        result, self._result = self._result, None
        if result is not None:
            put_back(self._dense, result)

    def _source_rank(self) -> int:
        return self._message._source_rank()

    def __del__(self) -> None:
        if not self._message.has_ended:
            self._dropped.append((self._message, self._dense))


def point_to_point(name: str) -> Callable[..., dist.Work]:
    """The method ``name`` of a group: of a list with one tensor, a rank unless that may be any, and
    a tag."""
    native = "send_plain" if name == "send" else "receive_plain"
    anywhere = (-1,) if name == "recv_anysource" else ()

    @disable_dynamo
    def method(self: Any, tensors: list[Tensor], *place: int) -> dist.Work:
        (tensor,) = tensors
        if self._dropped:
            self._dropped[:] = [each for each in self._dropped if not each[0].has_ended]
        # The short way, of a contiguous tensor: one native call, if nobody looks.
        if not is_profiler_enabled() and not dispatch_mode_count():
            message = getattr(self._backend.core, native)(tensor, *anywhere, *place)
            if message is not None:
                return MessageWork(message, tensor, None, self._dropped)
        if not tensor.is_cpu:
            # Torch joins the calls of batch_isend_irecv only in a group of one backend; elsewhere
            # NCCL's calls might wait for each other.
            raise NotImplementedError(
                f"{name} of a tensor on {tensor.device} needs a group of that device's backend "
                "alone; make one, as by new_group(backend='nccl')"
            )

        def serve(arguments: Sequence[Any]) -> dist.Work:
            (tensor,) = arguments[0]
            if name == "send":
                dense = to_dense(tensor)
                message = self._backend.send(dense, *place)
                return MessageWork(message, dense, None, self._dropped)
            dense = to_dense_in_place(tensor)
            peer = None if name == "recv_anysource" else place[0]
            message = self._backend.receive(dense, peer, place[-1])
            return MessageWork(message, dense, tensor, self._dropped)

        seen = is_seen(tensors)
        return self._shown(name, (tensors, *place), serve) if seen else serve((tensors,))

    return method
