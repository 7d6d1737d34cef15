"""Communication between the stages of an SPMD pipeline: the sources of a stage's micro-batches and
the sinks of its results."""

from __future__ import annotations

import atexit
import functools
import gc
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._torch_private import group_named
from pipekernels.comm import messages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

if dist.is_available():
    # Import now: the default group at import becomes the default argument of its functions. torch's
    # compiler imports it too, perhaps after a group was made, and the functions would keep that.
    import torch.distributed.nn.functional


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Features(NamedTuple):
    """What a rank must know about a tensor, or its gradient, before it receives it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Features:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @classmethod
    def parse(cls, record: Any) -> Features | None:
        """The inverse of :meth:`as_message`, also of None; ValueError if ``record`` is neither."""
        if record is None:
            return None
        shape, name, requires_grad = messages.fields(record, list, str, bool)
        if name not in _DTYPES:
            raise ValueError(f"there is no dtype {name!r}")
        shape = messages.fields(shape, *[int] * len(shape))
        return cls(tuple(shape), _DTYPES[name], requires_grad)

    def as_message(self) -> list[Any]:
        """As JSON has it."""
        return [list(self.shape), str(self.dtype), self.requires_grad]

    def __str__(self) -> str:
        grad = " that requires a gradient" if self.requires_grad else ""
        return f"{self.dtype} {list(self.shape)}{grad}"


def zeros(features: Features, device: torch.device) -> Tensor:
    return torch.zeros(features.shape, dtype=features.dtype, device=device)


@dataclass(frozen=True)
class Axis:
    """The ranks along one mesh dimension that have this rank's coordinates in all others."""

    group_name: str
    """Not the group: graphs and modules hold this object, and a group that outlives
    ``destroy_process_group()`` still has threads when the interpreter ends (pytorch#190489)."""
    device_type: str
    ranks: list[int]
    """Ranks in the default group, by stage."""
    index: int

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> Axis:
        _collect_at_exit()
        ranks = ranks_along(mesh, [name])
        group_name = mesh.get_group(name).group_name
        return cls(group_name, mesh.device_type, ranks, ranks.index(dist.get_rank()))

    @property
    def group(self) -> dist.ProcessGroup:
        """Their group. RuntimeError if it was destroyed."""
        return group_named(self.group_name)

    @property
    def device(self) -> torch.device:
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.ranks) - 1


@functools.cache
def _collect_at_exit() -> None:
    """Collect groups in reference cycles before the interpreter shuts down: Gloo's threads may
    still need its lock (pytorch#190489). Loading torch's compiler, which the first call of a
    function that disables it does, leaves cycles that refer to callers' frames."""
    atexit.register(gc.collect)


def ranks_along(mesh: DeviceMesh, names: Collection[str]) -> list[int]:
    """Ranks whose place in the mesh differs from this rank's in the named dimensions alone."""
    known = mesh.mesh_dim_names or ()
    for name in names:
        if name not in known:
            raise ValueError(
                f"the mesh has no dimension {name!r}; its dimensions are {list(known)} "
                "(mesh_dim_names of init_device_mesh)"
            )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; call this on its ranks only"
        )
    where = [slice(None) if n in names else i for n, i in zip(known, place, strict=True)]
    return mesh.mesh[tuple(where)].flatten().tolist()


class _Link:
    """Messages to and from the rank of a neighbouring stage.

    They flow one way at a time: first results, later gradients the other way. A receiver posts the
    receive of the next message before it works on the present one. So a rank that waits, for a
    message or for the end of its last send, waits for a neighbour's work on an earlier micro-batch,
    never for a rank that waits for it. Sends and receives need not be batched, and start as early
    as possible.
    """

    def __init__(self, axis: Axis, stage: int) -> None:
        self._axis, self._device, self._rank = axis, axis.device, axis.ranks[stage]
        self._sent: tuple[dist.Work, Tensor] | None = None
        self._features: Features
        self._left = 0
        self._coming: tuple[dist.Work, Tensor]

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
        message = features and features.as_message(), count
        messages.send(message, self._rank, self._axis.group)

    def announced(self) -> tuple[Features | None, int]:
        return messages.receive(_announcement, self._rank, self._axis.group)

    def expect(self, features: Features, count: int) -> None:
        """Post the first of ``count`` receives; :meth:`receive` posts the next one."""
        self._features, self._left = features, count
        self._coming = self._receive_later()

    def receive(self) -> Tensor:
        work, tensor = self._coming
        self._left -= 1
        if self._left:
            self._coming = self._receive_later()
        else:
            del self._coming
        work.wait()
        return tensor

    def skip(self) -> None:
        """Receive the remaining tensors and drop them."""
        while self._left:
            self.receive()

    def _receive_later(self) -> tuple[dist.Work, Tensor]:
        shape, dtype, _ = self._features
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return cast(dist.Work, dist.irecv(tensor, self._rank, self._axis.group)), tensor


def _announcement(record: Any) -> tuple[Features | None, int]:
    features, count = messages.fields(record, (list, type(None)), int)
    return Features.parse(features), count


class Source(ABC):
    """The source of a stage's micro-batches, to which their gradients are given back."""

    wants_grad = False

    def begin(self) -> bool:
        """Whether micro-batches will come.

        Raises:
            ValueError: not as many as this stage was told.
        """
        return True

    @abstractmethod
    def take(self, m: int) -> Tensor:
        """Micro-batch ``m``; they are taken in order."""

    def give_back(self, m: int, grad: Tensor | None) -> None:
        """Take the gradient of micro-batch ``m``, the last one first. No-op by default."""
        return

    def skip(self) -> None:
        """Drop the micro-batches that were not taken. No-op by default."""
        return

    def finish(self) -> Tensor | None:
        """End the backward. Returns the gradient of the batch, if any."""
        return None


class FromBatch(Source):
    """The first stage's source: slices of the batch."""

    def __init__(self, x: Any, count: int) -> None:
        self.wants_grad = isinstance(x, Tensor) and x.requires_grad
        self._x = x
        self._count = count
        self._grad: Tensor | None = None

    def take(self, m: int) -> Tensor:
        # A copy, so that layers may work in place: slices of one tensor share its version counter.
        return self._slice(self._x, m).clone()

    def give_back(self, m: int, grad: Tensor | None) -> None:
        if self.wants_grad and grad is not None:
            if self._grad is None:
                self._grad = torch.zeros_like(self._x)
            self._slice(self._grad, m).copy_(grad)

    def finish(self) -> Tensor | None:
        grad, self._grad = self._grad, None
        return grad

    def _slice(self, x: Tensor, m: int) -> Tensor:
        size = x.size(0) // self._count
        return x.narrow(0, m * size, size)


class FromPrevious(Source):
    """Any other stage's source: what the previous stage sends."""

    def __init__(self, axis: Axis, count: int, features: Features | None = None) -> None:
        self._link = _Link(axis, axis.index - 1)
        self._device = axis.device
        self._count = count
        self._features = features
        if features is not None:
            self._expect(features, count)

    def begin(self) -> bool:
        features, count = self._link.announced()
        if features is None:
            return False
        self._expect(features, count)
        if count != self._count:
            raise ValueError(
                f"num_microbatches is {self._count} on this stage and {count} on the one before; "
                "pass the same on all ranks"
            )
        return True

    def take(self, m: int) -> Tensor:
        return self._link.receive()

    def give_back(self, m: int, grad: Tensor | None) -> None:
        if self.wants_grad:
            assert self._features is not None
            self._link.send(zeros(self._features, self._device) if grad is None else grad)

    def skip(self) -> None:
        self._link.skip()

    def finish(self) -> Tensor | None:
        self._link.flush()
        return None

    def _expect(self, features: Features, count: int) -> None:
        self._features = features
        self.wants_grad = features.requires_grad
        self._link.expect(features, count)


class FromNothing(Source):
    """The first stage's state in ``execute_pipeline_step``: zeros."""

    def __init__(self, axis: Axis, features: Features) -> None:
        self.wants_grad = features.requires_grad
        self._zeros = partial(zeros, features, axis.device)

    def take(self, m: int) -> Tensor:
        return self._zeros()


class Sink(ABC):
    """The destination of a stage's results, from which their gradients come.

    Args:
        count: number of results.
        features: those that every result must have; None: those of the first.
    """

    def __init__(self, count: int, features: Features | None = None) -> None:
        self.features = features
        self._count = count

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

    @abstractmethod
    def put(self, m: int, result: Tensor) -> None:
        """Pass on result ``m``, which was checked."""

    def give_up(self) -> None:
        """After a failure, tell or send the receiver something in place of missing results. Some
        have nothing to do."""
        return

    def finish(self) -> None:
        """End the forward. No-op by default."""
        return

    def begin_backward(self, grad: Tensor | None) -> None:
        """Take the gradient of the whole output. No-op by default."""
        return

    @abstractmethod
    def grad_of(self, m: int) -> Tensor | None:
        """The gradient of result ``m``; the last one is asked for first."""


class ToWhole(Sink):
    """The last stage's sink: one output, written micro-batch by micro-batch."""

    _output: Tensor

    def __init__(self, count: int, features: Features | None = None) -> None:
        super().__init__(count, features)
        self._grads: list[Tensor] = []

    def check(self, m: int, result: Any) -> None:
        super().check(m, result)
        if result.dim() == 0:
            raise ValueError(
                "the last stage returned a tensor without dimensions; outputs are joined along "
                "dimension 0 (compute a scalar loss outside the pipeline)"
            )

    def put(self, m: int, result: Tensor) -> None:
        rows = result.size(0)
        if m == 0:
            self._output = result.new_empty((self._count * rows, *result.shape[1:]))
        self._output.narrow(0, m * rows, rows).copy_(result)

    def take(self) -> Tensor:
        """All results, along dimension 0."""
        # Drops the reference: the output's graph keeps this object.
        output = self._output
        del self._output
        return output

    def begin_backward(self, grad: Tensor | None) -> None:
        self._grads = [] if grad is None else list(grad.tensor_split(self._count))

    def grad_of(self, m: int) -> Tensor | None:
        return self._grads.pop() if self._grads else None


class ToNext(Sink):
    """Any other stage's sink: what the next stage receives."""

    def __init__(self, axis: Axis, count: int, features: Features | None = None) -> None:
        super().__init__(count, features)
        self._link = _Link(axis, axis.index + 1)
        self._device = axis.device
        self._announced = features is not None
        self._done = 0

    def put(self, m: int, result: Tensor) -> None:
        if not self._announced:
            self._link.announce(self.features, self._count)
            self._announced = True
        self._link.send(result)
        self._done += 1

    def give_up(self) -> None:
        if not self._announced:
            self._link.announce(None, 0)
            return
        assert self.features is not None
        for _ in range(self._done, self._count):
            self._link.send(zeros(self.features, self._device))

    def finish(self) -> None:
        self._link.flush()

    def grad_of(self, m: int) -> Tensor | None:
        assert self.features is not None
        if not self.features.requires_grad:
            return None
        if m == self._count - 1:
            self._link.expect(self.features, self._count)
        return self._link.receive()
