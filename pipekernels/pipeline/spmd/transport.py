"""Communication of an SPMD stage with its neighbours."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels.comm import messages
from pipekernels.pipeline.spmd.axis import Axis


class Features(NamedTuple):
    """What a rank must know about a tensor, or its gradient, before it receives it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Features:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        grad = " that requires a gradient" if self.requires_grad else ""
        return f"{self.dtype} {list(self.shape)}{grad}"


class _Announcement(NamedTuple):
    features: Features | None
    number: int


class _Link:
    """Messages to and from the rank of a neighbouring stage.

    They flow one way at a time: first results, later gradients the other way. A receiver posts the
    receive of the next message before it works on the present one. So a rank that waits, for a
    message or for the end of its last send, waits for a neighbour's work on an earlier micro-batch,
    never for a rank that waits for it. Sends and receives need not be batched, and start as early
    as possible.
    """

    def __init__(self, axis: Axis, stage: int) -> None:
        self._axis = axis
        self._device = axis.device
        self._rank = axis.ranks[stage]
        self._sent: tuple[dist.Work, Tensor] | None = None
        self._expected: tuple[Features, int] | None = None  # And how many are left to receive.
        self._coming: tuple[dist.Work, Tensor] | None = None

    def send(self, tensor: Tensor) -> None:
        """Send without waiting, except for the end of the previous send."""
        self.flush()
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        self._sent = cast(dist.Work, dist.isend(dense, self._rank, self._axis.group)), dense

    def flush(self) -> None:
        """Wait for the end of the last send, and release its memory."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None

    def announce(self, features: Features | None, count: int) -> None:
        """Tell the receiver the features and number of tensors to come; None: there are none."""
        messages.send(_Announcement(features, count), self._rank, self._axis.group)

    def announced(self) -> _Announcement:
        return messages.receive(_Announcement, self._rank, self._axis.group)

    def expect(self, features: Features, count: int) -> None:
        """Post the first of ``count`` receives; :meth:`receive` posts the next one."""
        self._expected = features, count
        self._post()

    def receive(self) -> Tensor:
        assert self._coming is not None
        work, tensor = self._coming
        self._post()
        work.wait()
        return tensor

    def skip(self) -> None:
        """Receive the remaining tensors and drop them."""
        while self._coming is not None:
            self.receive()

    def _post(self) -> None:
        self._coming = None
        if self._expected is not None:
            features, left = self._expected
            self._expected = (features, left - 1) if left > 1 else None
            tensor = torch.empty(features.shape, dtype=features.dtype, device=self._device)
            work = dist.irecv(tensor, self._rank, self._axis.group)
            self._coming = cast(dist.Work, work), tensor


class Passage:
    """A batch on its way through this rank's stage, and its gradients on the way back.

    The first stage takes micro-batches from the batch, or zeros if there is none; the last one
    writes the output. All others receive from, and send to, their neighbours.

    Args:
        axis: the stages.
        count: number of micro-batches.
        batch: ``[count * rows, ...]``, on the first stage.
        features: of every micro-batch and result, if all ranks know them. Default: a stage tells
            the next one those of its first result.
    """

    def __init__(
        self, axis: Axis, count: int, batch: Any = None, features: Features | None = None
    ) -> None:
        self.wants_grad = isinstance(batch, Tensor) and batch.requires_grad
        """Whether the micro-batches have gradients."""
        self.features = features
        """The features of the results."""
        self._device = axis.device
        self._count = count
        self._batch = batch
        self._batch_grad: Tensor | None = None
        self._received: Features | None = None  # Of the micro-batches.
        self._previous = None if axis.is_first else _Link(axis, axis.index - 1)
        self._next = None if axis.is_last else _Link(axis, axis.index + 1)
        self._is_announced = features is not None
        self._done = 0  # Number of results.
        self._output: Tensor | None = None
        self._output_grads: list[Tensor] = []
        if features is not None:
            self._expect(features, count)

    def begin(self) -> bool:
        """Whether micro-batches will come. ValueError if not as many as this stage was told."""
        if self._previous is None:
            return True
        features, count = self._previous.announced()
        if features is None:
            return False
        self._expect(features, count)
        if count != self._count:
            raise ValueError(
                f"num_microbatches is {self._count} on this stage and {count} on the one before; "
                "pass the same on all ranks"
            )
        return True

    def _expect(self, features: Features, count: int) -> None:
        self._received = features
        self.wants_grad = features.requires_grad
        if self._previous is not None:
            self._previous.expect(features, count)

    def take(self, m: int) -> Tensor:
        """Micro-batch ``m``; they are taken in order."""
        if self._previous is not None:
            return self._previous.receive()
        if self._received is not None:
            return self._received.zeros(self._device)
        # A copy, so that layers may work in place: slices of one tensor share its version counter.
        return self._slice(self._batch, m).clone()

    def check(self, m: int, result: Any) -> None:
        """Raise a TypeError or ValueError if ``result`` is not what the receiver expects."""
        if not isinstance(result, Tensor):
            raise TypeError(f"the module must return a tensor, not {type(result).__name__}")
        if result.layout is not torch.strided or hasattr(result, "device_mesh"):
            raise TypeError(
                f"the module returned a {type(result).__name__} of layout {result.layout}, which "
                "the stages cannot send; return an ordinary dense tensor (full_tensor(), "
                "to_dense())"
            )
        features = Features.of(result)
        if self.features is None:
            self.features = features
        shape, dtype, requires_grad = self.features
        if features[:2] != (shape, dtype) or features.requires_grad > requires_grad:
            raise ValueError(
                f"the module returned {features} for micro-batch {m}, not {self.features}; "
                "every micro-batch must give the same"
            )
        if self._next is None and result.dim() == 0:
            raise ValueError(
                "the last stage returned a tensor without dimensions; outputs are joined along "
                "dimension 0 (compute a scalar loss outside the pipeline)"
            )

    def put(self, m: int, result: Tensor) -> None:
        """Pass on result ``m``, which was checked."""
        if self._next is not None:
            if not self._is_announced:
                self._next.announce(self.features, self._count)
                self._is_announced = True
            self._next.send(result)
            self._done += 1
            return
        if self._output is None:
            self._output = result.new_empty((self._count * len(result), *result.shape[1:]))
        self._slice(self._output, m).copy_(result)

    def abandon(self) -> None:
        """After a failure: receive what still comes, and tell or send the next stage something in
        place of missing results. The neighbours wait for every message."""
        if self._previous is not None:
            self._previous.skip()
        if self._next is None:
            return
        if not self._is_announced:
            self._next.announce(None, 0)
            return
        assert self.features is not None
        for _ in range(self._done, self._count):
            self._next.send(self.features.zeros(self._device))

    def flush(self) -> None:
        """End the forward."""
        if self._next is not None:
            self._next.flush()

    def output(self, features: Features) -> Tensor:
        """All results along dimension 0 on the last stage, zeros of ``features`` on the others."""
        # Drops the reference: the output's graph keeps this object.
        output, self._output = self._output, None
        return features.zeros(self._device) if output is None else output

    def begin_backward(self, grad: Tensor | None) -> None:
        """Take the gradient of the output, which counts on the last stage alone."""
        if self._next is None:
            self._output_grads = [] if grad is None else list(grad.tensor_split(self._count))

    def grad_of(self, m: int) -> Tensor | None:
        """The gradient of result ``m``; the last one is asked for first."""
        if self._next is None:
            return self._output_grads.pop() if self._output_grads else None
        assert self.features is not None
        if not self.features.requires_grad:
            return None
        if m == self._count - 1:
            self._next.expect(self.features, self._count)
        return self._next.receive()

    def give_back(self, m: int, grad: Tensor | None) -> None:
        """Take the gradient of micro-batch ``m``, the last one first."""
        if not self.wants_grad:
            return
        if self._previous is not None:
            assert self._received is not None
            self._previous.send(self._received.zeros(self._device) if grad is None else grad)
        elif self._batch is not None and grad is not None:
            if self._batch_grad is None:
                self._batch_grad = torch.zeros_like(self._batch)
            self._slice(self._batch_grad, m).copy_(grad)

    def end_backward(self) -> Tensor | None:
        """The gradient of the batch, if any."""
        if self._previous is not None:
            self._previous.flush()
        grad, self._batch_grad = self._batch_grad, None
        return grad

    def _slice(self, whole: Tensor, m: int) -> Tensor:
        rows = len(whole) // self._count
        return whole.narrow(0, m * rows, rows)
