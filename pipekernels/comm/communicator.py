"""One rank's end of a communicator: collectives on CPU tensors, through shared memory."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from pipekernels import _backend
from pipekernels.comm import tuning
from pipekernels.comm.bootstrap import join_processes
from pipekernels.comm.errors import PeerError
from pipekernels.ops.collectives import communicator_of, resolve_handle

if TYPE_CHECKING:
    from typing_extensions import Self

# The codes of csrc/include/pipekernels/dtype.h.
_REDUCIBLE = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
_MOVABLE = _REDUCIBLE | {
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 9,
    torch.complex64: 10,
    torch.complex128: 11,
}
_REDUCTIONS = {"sum": 0, "avg": 1, "max": 2, "min": 3}
_ALGORITHMS = {"auto": 0, "one_shot": 1, "two_shot": 2, "ring": 3}

_handles = itertools.count(1)


class Communicator:
    """One rank's end of a communicator over ranks that share memory.

    Made by :meth:`from_process_group` (ranks are processes of one host) or :meth:`threads` (ranks
    are threads of this process). All ranks call the same collectives in the same order; calls from
    several threads of one rank take turns.

    Reductions have one answer: elements are combined in rank order, 16-bit floats in float32 and
    rounded once, so that all ranks get the same bits, in every run and by every algorithm.

    Tensors are on the CPU and may have any layout. One made by :meth:`empty` is read by the peers
    in place, which saves copies. No collective is differentiable; see :mod:`pipekernels.ops`.

    Every collective raises, besides what it says itself:
        ValueError: the ranks call different collectives, or with different sizes, dtypes or
            arguments; raised on all ranks, and the communicator stays usable. Or a tensor that is
            not on the CPU.
        PeerError: a rank has died, closed its communicator or given up; raised on all that are
            left. The communicator cannot be used any more.
        TimeoutError: a rank did not arrive within ``timeout``. The communicator cannot be used any
            more.
        RuntimeError: the communicator has been closed, cannot be used any more, or belongs to the
            process that this one was forked from.

    After an error the contents of the tensors that a collective was to fill are undefined. An error
    in a rank's own arguments is raised before any communication, on that rank alone.
    """

    def __init__(self, core: Any, rank: int, world_size: int, timeout: float) -> None:
        self._core = core
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._handle = next(_handles)
        resolve_handle[self._handle] = self

    @classmethod
    def from_process_group(
        cls, group: dist.ProcessGroup | None = None, *, timeout: float = 30.0
    ) -> Communicator:
        """A communicator over the ranks of a ``torch.distributed`` group, all on one host.

        A collective over the group, which is not needed afterwards.

        Args:
            group: the default group if ``None``; its backend does not matter.
            timeout: seconds that this rank waits for the others, in any call.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised, the ranks are not on one host,
                or they cannot share memory.
            ValueError: this process is not in ``group``, or ``timeout`` is not positive.
        """
        _check_timeout(timeout)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group() first, "
                "or use Communicator.threads()"
            )
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("this process is not a member of the group; pass one that it is in")
        segment, pidfds = join_processes(group, timeout)
        core = _load().Communicator(segment, rank, pidfds, timeout)
        return cls(core, rank, world_size, timeout)

    @classmethod
    def threads(cls, world_size: int, *, timeout: float = 30.0) -> list[Communicator]:
        """Communicators over ranks that are threads of this process, one for each rank.

        Args:
            world_size: the number of ranks.
            timeout: seconds that a rank waits for the others, in any call.

        Raises:
            ValueError: ``world_size`` is less than 1, or ``timeout`` is not positive.
        """
        _check_timeout(timeout)
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        module = _load()
        fd = module.Segment.create(world_size, tuning.one_shot_bytes(world_size))
        try:
            segment = module.Segment(fd, world_size)
        finally:
            os.close(fd)
        cores = [module.Communicator(segment, rank, [], timeout) for rank in range(world_size)]
        return [cls(core, rank, world_size, timeout) for rank, core in enumerate(cores)]

    @staticmethod
    def from_handle(handle: int) -> Communicator:
        """The communicator with this :attr:`handle`.

        Raises:
            RuntimeError: it has been closed or garbage-collected.
        """
        return communicator_of(handle)

    @property
    def rank(self) -> int:
        """This rank, from 0 on."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @property
    def timeout(self) -> float:
        """Seconds that this rank waits for the others, in any call."""
        return self._timeout

    @property
    def handle(self) -> int:
        """A number that names this communicator in this process."""
        return self._handle

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto") -> Tensor:
        """Reduce ``tensor`` elementwise over all ranks, in place.

        Args:
            tensor: any shape, float64, float32, float16, bfloat16, int32 or int64; the same number
                of elements and dtype on all ranks.
            op: ``'sum'``, ``'avg'`` (of floating-point types), ``'max'`` or ``'min'`` (NaN where a
                rank has NaN). Sums of integers wrap around.
            algorithm: ``'one_shot'``: every rank reads all tensors (small ones). ``'two_shot'``:
                every rank reduces its slice and collects those of its peers (large ones).
                ``'ring'``: chunks travel from neighbour to neighbour. ``'auto'``: one of the
                first two by size, at the limit that ``pipekernels tune`` has measured on the
                machine, or a built-in one. The result does not depend on it.

        Returns:
            ``tensor``.

        Raises:
            TypeError: a dtype that cannot be reduced.
            ValueError: an unknown ``op`` or ``algorithm``, or ``'avg'`` of integers.
        """
        try:
            dtype = _REDUCIBLE[tensor.dtype]
            codes = dtype, _REDUCTIONS[op], _ALGORITHMS[algorithm]
        except KeyError:
            _raise_for(tensor, op, algorithm)
        dense = tensor
        if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
            dense = _dense(tensor)
        self._core.all_reduce(dense.data_ptr(), dense.numel(), *codes)
        if dense is not tensor:
            with torch.no_grad():
                tensor.copy_(dense)
        else:
            _mark_changed(tensor)
        return tensor

    def reduce_scatter(self, input: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``input`` elementwise over all ranks, and return this rank's slice.

        Args:
            input: ``[world_size * k, ...]``, a dtype as for :meth:`all_reduce`; the same shape and
                dtype on all ranks.
            op: as for :meth:`all_reduce`.

        Returns:
            ``[k, ...]``: rows ``rank * k`` to ``(rank + 1) * k`` of the reduction.

        Raises:
            TypeError: a dtype that cannot be reduced.
            ValueError: a first dimension that ``world_size`` does not divide, an unknown ``op``, or
                ``'avg'`` of integers.
        """
        if input.dtype not in _REDUCIBLE or op not in _REDUCTIONS:
            _raise_for(input, op, "auto")
        if input.dim() == 0 or input.shape[0] % self._world_size != 0:
            raise ValueError(
                f"reduce_scatter splits dimension 0 into {self._world_size} equal slices, but the "
                f"input has shape {tuple(input.shape)}; pad it to a multiple of {self._world_size}"
            )
        dense = _dense(input)
        rows = input.shape[0] // self._world_size
        output = torch.empty((rows, *input.shape[1:]), dtype=input.dtype)
        self._core.reduce_scatter(
            dense.data_ptr(),
            output.data_ptr(),
            output.numel(),
            _REDUCIBLE[input.dtype],
            _REDUCTIONS[op],
        )
        return output

    def all_gather(self, input: Tensor) -> Tensor:
        """The inputs of all ranks, concatenated along the first dimension in rank order.

        Args:
            input: ``[k, ...]``, any dtype; the same shape and dtype on all ranks.

        Returns:
            ``[world_size * k, ...]``.

        Raises:
            ValueError: ``input`` has no dimension.
        """
        if input.dim() == 0:
            raise ValueError(
                "all_gather joins tensors along dimension 0, but the input has none; "
                "pass input[None]"
            )
        dense = _dense(input)
        output = torch.empty(
            (self._world_size * input.shape[0], *input.shape[1:]), dtype=input.dtype
        )
        self._core.all_gather(dense.data_ptr(), output.data_ptr(), *_elements(dense))
        return output

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Copy ``tensor`` of rank ``src`` to ``tensor`` of all ranks, in place.

        Args:
            tensor: any shape and dtype, the same number of elements and dtype on all ranks.
            src: the rank that sends.

        Returns:
            ``tensor``.

        Raises:
            ValueError: ``src`` is no rank.
        """
        dense = _dense(tensor)
        self._core.broadcast(dense.data_ptr(), *_elements(dense), src)
        if dense is not tensor:
            with torch.no_grad():
                tensor.copy_(dense)
        else:
            _mark_changed(tensor)
        return tensor

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._core.barrier()

    def empty(self, *shape: int | Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor in memory that the peers can access: a symmetric tensor.

        A call of this rank alone. The memory is this tensor's (and its views') as long as any of
        them lives, also after :meth:`close`.

        Args:
            shape: sizes, one by one or as one sequence.
            dtype: any.

        Raises:
            ValueError: a negative size.
            RuntimeError: the symmetric memory is exhausted, or the communicator has been closed.
        """
        one_argument = len(shape) == 1 and isinstance(shape[0], Iterable)
        sizes = torch.Size(cast("Iterable[int]", shape[0] if one_argument else shape))
        if sizes and min(sizes) < 0:
            raise ValueError(f"sizes must not be negative, got {tuple(sizes)}")
        buffer = self._core.allocate(sizes.numel() * dtype.itemsize)
        if sizes.numel() == 0:  # Which torch.frombuffer() does not take.
            return torch.empty(sizes, dtype=dtype)
        # Reshaped in place: a view, as the output of a custom autograd function, could not be changed.
        return torch.frombuffer(buffer, dtype=dtype).resize_(sizes)

    def close(self) -> None:
        """Leave: peers that need this rank, now or later, get a :class:`PeerError`.

        Gives the shared memory back, but for symmetric tensors that are still in use. Does nothing
        the second time. A collective in another thread of this rank fails.
        """
        resolve_handle.pop(self._handle, None)
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._core.abort()  # So that the peers learn that this rank gave up.
        self.close()

    def __repr__(self) -> str:
        return f"Communicator(rank={self._rank}, world_size={self._world_size})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Communicator cannot be pickled or copied: it belongs to its process")


def _load() -> Any:
    module = _backend.load()
    module.set_peer_error(PeerError)
    return module


def _check_timeout(timeout: float) -> None:
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")


def _raise_for(tensor: Tensor, op: str, algorithm: str) -> NoReturn:
    """Say which of the arguments has no code."""
    if op not in _REDUCTIONS:
        raise ValueError(f"op must be one of {', '.join(_REDUCTIONS)}, got {op!r}")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    names = ", ".join(str(dtype) for dtype in _REDUCIBLE)
    raise TypeError(f"cannot reduce {tensor.dtype}; convert the tensor to one of {names}")


def _dense(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or a copy of it in which elements lie as they are counted."""
    if not tensor.is_cpu:
        raise ValueError(
            f"a communicator over shared memory works on CPU tensors, got one on {tensor.device}; "
            "pass tensor.cpu()"
        )
    if tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor
    return tensor.detach().resolve_neg().resolve_conj().contiguous()


def _elements(dense: Tensor) -> tuple[int, int]:
    """The number of elements and the code of their dtype; of bytes, if that has none."""
    code = _MOVABLE.get(dense.dtype)
    if code is None:
        return dense.numel() * dense.itemsize, _MOVABLE[torch.uint8]
    return dense.numel(), code


def _mark_changed(tensor: Tensor) -> None:
    """Let autograd see that ``tensor`` has changed in place, in case it was saved for backward."""
    try:  # noqa: SIM105 (contextlib.suppress takes longer than a small collective)
        increment_version(tensor)
    except RuntimeError:  # Inference tensors have no version.
        pass
