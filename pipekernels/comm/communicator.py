"""One rank's end of a communicator: collectives on CPU tensors."""

from __future__ import annotations

import functools
import itertools
import math
import os
import pickle
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from pipekernels import _backend
from pipekernels.comm import tuning
from pipekernels.comm.bootstrap import join_processes
from pipekernels.comm.codes import ALGORITHMS, MOVABLE, REDUCIBLE, REDUCTIONS
from pipekernels.comm.errors import PeerError
from pipekernels.comm.hosts import GRACE, Hosts
from pipekernels.comm.rendezvous import Rendezvous, of_color, over_group, over_store
from pipekernels.ops.collectives import communicator_of, resolve_handle

if TYPE_CHECKING:
    from typing_extensions import Self

_handles = itertools.count(1)


class Communicator:
    """One rank's end of a communicator.

    Made by :meth:`from_process_group` or :meth:`from_store` (ranks are processes), or
    :meth:`threads` (ranks are threads of this process). All ranks call the same collectives in the
    same order; calls from several threads of one rank take turns.

    Reductions have one answer: elements are combined in rank order, 16-bit floats in float32 and
    rounded once, so that all ranks get the same bits, in every run and by every algorithm.

    Ranks share memory where they can: processes of one host, user, and pid and network namespace.
    If they are on several hosts, data are reduced inside each host in rank order as above, then
    between the hosts by Gloo, in its order and without wider intermediate results, then gathered
    inside each host; all ranks get the same bits then too. Ranks that see different values of the
    environment variable ``PIPEKERNELS_HOST_ID`` count as ranks of different hosts.

    Tensors are on the CPU and may have any layout. One made by :meth:`empty` is read by the peers
    in place, which saves copies. No collective is differentiable; see :mod:`pipekernels.ops`.

    Every collective raises, besides what it says itself:
        ValueError: the ranks call different collectives, or with different shapes, dtypes or
            arguments; raised on all ranks, and the communicator stays usable. Or a tensor that is
            not on the CPU.
        PeerError: a rank has died, closed its communicator or given up; raised on all that are
            left. Names the rank, unless it is on another host. The communicator cannot be used any
            more.
        TimeoutError: a rank did not arrive within ``timeout``. The communicator cannot be used any
            more.
        RuntimeError: the communicator has been closed, cannot be used any more, or belongs to the
            process that this one was forked from.

    After an error the contents of the tensors that a collective was to fill are undefined. An error
    in a rank's own arguments is raised before any communication, on that rank alone.
    """

    def __init__(
        self,
        core: Any,
        rank: int,
        world_size: int,
        timeout: float,
        divide: Callable[[Communicator, int | None, int], Communicator | None],
    ) -> None:
        self._core = core
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._divide = divide
        self._handle = next(_handles)
        resolve_handle[self._handle] = self

    @classmethod
    def from_process_group(
        cls, group: dist.ProcessGroup | None = None, *, timeout: float = 30.0
    ) -> Communicator:
        """A communicator over the ranks of a ``torch.distributed`` group, of one host or several.

        A collective over the group, which is not needed afterwards.

        Args:
            group: the default group if ``None``; its backend does not matter. Between hosts, the
                communicator makes Gloo connections of its own through the group's store.
            timeout: seconds that this rank waits for the others, in any call; one more for those of
                its host, if there are several.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised, or the ranks cannot share memory
                or reach each other.
            ValueError: this process is not in ``group``, or ``timeout`` is not positive.
        """
        _check_timeout(timeout)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group() first, "
                "or use Communicator.threads()"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of the group; pass one that it is in")
        return cast("Communicator", cls._join(over_group(group), timeout))

    @classmethod
    def from_store(
        cls, store: dist.Store, rank: int, world_size: int, *, timeout: float = 30.0
    ) -> Communicator:
        """A communicator over processes that reach one store, with no group of theirs.

        Args:
            store: for this communicator alone: a new one, or a new ``PrefixStore`` over an old one.
            rank: of this process, in ``0 .. world_size - 1``.
            world_size: the number of ranks.
            timeout: as for :meth:`from_process_group`.

        Raises:
            RuntimeError: the ranks cannot share memory or reach each other.
            TimeoutError: a rank did not come within ``timeout``.
            ValueError: there is no such rank, or ``timeout`` is not positive.
        """
        _check_timeout(timeout)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..world_size - 1, got {rank} of {world_size}")
        return cast(
            "Communicator", cls._join(over_store(store, rank, world_size, timeout), timeout)
        )

    @classmethod
    def _join(
        cls, rendezvous: Rendezvous, timeout: float, color: int | None = 0, key: int = 0
    ) -> Communicator | None:
        seat = join_processes(rendezvous, timeout, color, key)
        if seat is None:
            return None
        spans_hosts = len(seat.hosts) > 1
        position = seat.hosts[seat.host].index(seat.rank)
        core = _load().Communicator(
            seat.segment, position, seat.pidfds, timeout + GRACE if spans_hosts else timeout
        )
        if spans_hosts:
            core = Hosts(core, seat.hosts, seat.host, position, seat.lane, timeout)
        # Ranks that share memory find it again without a store, which they need not keep.
        store = rendezvous.store if spans_hosts else None
        divide = functools.partial(_divide_processes, store=store)
        return cls(core, seat.rank, seat.world_size, timeout, divide)

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
        return [
            cls(core, rank, world_size, timeout, _divide_threads) for rank, core in enumerate(cores)
        ]

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
            tensor: any shape, float64, float32, float16, bfloat16, int32 or int64; the same shape
                and dtype on all ranks.
            op: ``'sum'``, ``'avg'`` (of floating-point types), ``'max'`` or ``'min'`` (NaN where a
                rank has NaN). Sums of integers wrap around.
            algorithm: ``'one_shot'``: every rank reads all tensors (small ones). ``'two_shot'``:
                every rank reduces its slice and collects those of its peers (large ones).
                ``'ring'``: chunks travel from neighbour to neighbour. ``'auto'``: one of the
                first two by size, at the limit that ``pipekernels tune`` has measured on the
                machine, or a built-in one. The result does not depend on it.
                Over several hosts all are the same.

        Returns:
            ``tensor``.

        Raises:
            TypeError: a dtype that cannot be reduced.
            ValueError: an unknown ``op`` or ``algorithm``, or ``'avg'`` of integers.
        """
        try:
            dtype = REDUCIBLE[tensor.dtype]
            reduction, way = REDUCTIONS[op], ALGORITHMS[algorithm]
        except KeyError:
            _raise_for(tensor, op, algorithm)
        dense = tensor
        if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
            dense = _dense(tensor)
        self._core.all_reduce(
            dense.data_ptr(), dense.numel(), dtype, reduction, way, _digest(tensor)
        )
        if dense is not tensor:
            with torch.no_grad():
                tensor.copy_(dense)
        else:
            _mark_changed(tensor)
        return tensor

    def all_reduce_when_ready(
        self,
        tensor: Tensor,
        ready: Tensor,
        target: int,
        block_rows: int,
        *,
        op: str = "sum",
        blocks: int = 8,
    ) -> Tensor:
        """:meth:`all_reduce` of a CUDA tensor that another kernel is still writing, in place.

        Rows ``i * block_rows .. (i + 1) * block_rows - 1`` (fewer in the last block) count as
        complete when ``ready[i] >= target``. The tensor is reduced in chunks of consecutive rows,
        each as soon as it is complete on all ranks; the order of chunks is that of the rows, so the
        writer should finish rows in that order too. The result has the bits of :meth:`all_reduce`.

        The writer runs in another stream, and is launched before this call. It stores a block of
        rows, and only then raises its counter, with release semantics at the scope of the GPU (in
        Triton: ``tl.debug_barrier()``, then ``tl.atomic_add(ready + i, 1, sem="release")``). It
        does not touch the rows again. Nothing resets ``ready``: zero it, or raise ``target``, for
        the next call. This call returns at once, and work that follows in the current stream comes
        after the whole reduction, hence after the writer.

        Args:
            tensor: ``[rows, ...]``, contiguous, a dtype as for :meth:`all_reduce`, on CUDA; the same
                shape and dtype on all ranks. A symmetric one is read and written in place.
            ready: ``[ceil(rows / block_rows)]``, int32, contiguous, on the device of ``tensor``.
            target: what a counter reaches; may differ between ranks, as may ``block_rows``.
            block_rows: how many rows one counter stands for.
            op: as for :meth:`all_reduce`.
            blocks: how many thread blocks wait and reduce, at most; each keeps up to one
                multiprocessor from the writer. The same on all ranks.

        Returns:
            ``tensor``.

        Raises:
            TypeError: a dtype that cannot be reduced, or a ``ready`` that is not int32.
            ValueError: a tensor that is not contiguous or not on CUDA, a ``ready`` that does not fit
                it, ``block_rows`` or ``blocks`` less than 1, or as :meth:`all_reduce`.
        """
        raise RuntimeError("CUDA collectives are not built yet")

    def reduce_scatter(
        self, input: Tensor, op: str = "sum", *, out: Tensor | None = None
    ) -> Tensor:
        """Reduce ``input`` elementwise over all ranks, and return this rank's slice.

        Args:
            input: ``[world_size * k, ...]``, a dtype as for :meth:`all_reduce`; the same shape and
                dtype on all ranks.
            op: as for :meth:`all_reduce`.
            out: where the result is to be; a new tensor if ``None``. Contiguous, apart from
                ``input``.

        Returns:
            ``[k, ...]``: rows ``rank * k`` to ``(rank + 1) * k`` of the reduction.

        Raises:
            TypeError: a dtype that cannot be reduced.
            ValueError: a first dimension that ``world_size`` does not divide, an unknown ``op``,
                ``'avg'`` of integers, or an ``out`` that does not suit the result.
        """
        if input.dtype not in REDUCIBLE or op not in REDUCTIONS:
            _raise_for(input, op, "auto")
        if input.dim() == 0 or input.shape[0] % self._world_size != 0:
            raise ValueError(
                f"reduce_scatter splits dimension 0 into {self._world_size} equal slices, but the "
                f"input has shape {tuple(input.shape)}; pad it to a multiple of {self._world_size}"
            )
        dense = _dense(input)
        rows = input.shape[0] // self._world_size
        output = _output(out, (rows, *input.shape[1:]), dense)
        self._core.reduce_scatter(
            dense.data_ptr(),
            output.data_ptr(),
            output.numel(),
            REDUCIBLE[input.dtype],
            REDUCTIONS[op],
            _digest(input),
        )
        if out is not None:
            _mark_changed(out)
        return output

    def all_gather(self, input: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The inputs of all ranks, concatenated along the first dimension in rank order.

        Args:
            input: ``[k, ...]``, any dtype; the same shape and dtype on all ranks.
            out: where the result is to be; a new tensor if ``None``. Contiguous; ``input`` may be
                this rank's rows of it, but not overlap it otherwise.

        Returns:
            ``[world_size * k, ...]``.

        Raises:
            ValueError: ``input`` has no dimension, or ``out`` does not suit the result.
        """
        if input.dim() == 0:
            raise ValueError(
                "all_gather joins tensors along dimension 0, but the input has none; "
                "pass input[None]"
            )
        dense = _dense(input)
        rows = self._world_size * input.shape[0]
        in_place = self._rank * dense.numel() * dense.itemsize
        output = _output(out, (rows, *input.shape[1:]), dense, in_place)
        self._core.all_gather(
            dense.data_ptr(), output.data_ptr(), *_elements(dense), _digest(input)
        )
        if out is not None:
            _mark_changed(out)
        return output

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Copy ``tensor`` of rank ``src`` to ``tensor`` of all ranks, in place.

        Args:
            tensor: any shape and dtype, the same on all ranks.
            src: the rank that sends.

        Returns:
            ``tensor``.

        Raises:
            ValueError: ``src`` is no rank.
        """
        dense = _dense(tensor)
        self._core.broadcast(dense.data_ptr(), *_elements(dense), src, _digest(tensor))
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

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """A communicator over the ranks that give the same ``color``, as ``MPI_Comm_split`` does.

        A collective over all ranks. This communicator and the new ones are independent: each is
        closed, and fails, by itself.

        Args:
            color: chooses the new communicator; ``None`` for a rank that will be in none.
            key: orders the ranks of the new communicator; this rank if ``None``. Ranks with equal
                keys keep their order.

        Returns:
            The new communicator, with the same timeout, or ``None`` if ``color`` is.

        Raises:
            TypeError: ``color`` or ``key`` is neither an integer nor ``None``.
            RuntimeError: the ranks cannot share memory or reach each other.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and not isinstance(value, int):
                raise TypeError(f"{name} must be an int or None, got {type(value).__name__}")
        return self._divide(self, color, self._rank if key is None else key)

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


def _divide_processes(
    parent: Communicator, color: int | None, key: int, *, store: dist.Store | None
) -> Communicator | None:
    """:meth:`Communicator.split` where the ranks are processes."""
    all_gather = functools.partial(_all_gather_objects, parent)
    rendezvous = Rendezvous(parent.rank, parent.world_size, all_gather, store)
    return Communicator._join(rendezvous, parent.timeout, color, key)


def _divide_threads(parent: Communicator, color: int | None, key: int) -> Communicator | None:
    """:meth:`Communicator.split` where the ranks are threads: the first one makes the new ends."""
    ranks = of_color(_all_gather_objects(parent, (color, key)), color)
    makes = color is not None and ranks[0] == parent.rank
    made = Communicator.threads(len(ranks), timeout=parent.timeout) if makes else []
    handles = _all_gather_objects(parent, [end.handle for end in made])
    end = None
    if color is not None:
        end = communicator_of(handles[ranks[0]][ranks.index(parent.rank)])
    parent.barrier()  # By then every rank has its end, and `made` is not needed any more.
    return end


def _all_gather_objects(comm: Communicator, item: Any) -> list[Any]:
    """The items of all ranks, in rank order; picklable."""
    data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
    sizes = comm.all_gather(torch.tensor([data.numel()], device="cpu")).tolist()
    padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
    rows = comm.all_gather(padded[None])
    return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def _check_timeout(timeout: float) -> None:
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")


def _raise_for(tensor: Tensor, op: str, algorithm: str) -> NoReturn:
    """Say which of the arguments has no code."""
    if op not in REDUCTIONS:
        raise ValueError(f"op must be one of {', '.join(REDUCTIONS)}, got {op!r}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    names = ", ".join(str(dtype) for dtype in REDUCIBLE)
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


def _output(
    out: Tensor | None, shape: tuple[int, ...], dense: Tensor, in_place: int | None = None
) -> Tensor:
    """``out`` if it is a place for a result of ``shape``; a new tensor for ``None``.

    ``dense``: the input. ``in_place``: at which byte of ``out`` the input may lie.
    """
    if out is None:
        return torch.empty(shape, dtype=dense.dtype, device=dense.device)
    is_plain = out.is_cpu and out.is_contiguous() and not (out.is_neg() or out.is_conj())
    if not is_plain or out.shape != shape or out.dtype != dense.dtype:
        raise ValueError(
            f"out must be a contiguous CPU tensor of shape {shape} and {dense.dtype}, got one of "
            f"shape {tuple(out.shape)}, strides {out.stride()} and {out.dtype} on {out.device}"
        )
    offset = dense.data_ptr() - out.data_ptr()  # In bytes.
    overlaps = -dense.numel() * dense.itemsize < offset < out.numel() * out.itemsize
    if overlaps and offset != in_place:
        raise ValueError("out must not overlap the input; pass another tensor")
    return out


def _elements(dense: Tensor) -> tuple[int, int]:
    """The number of elements and the code of their dtype; of bytes, if that has none."""
    code = MOVABLE.get(dense.dtype)
    if code is None:
        return dense.numel() * dense.itemsize, MOVABLE[torch.uint8]
    return dense.numel(), code


def _digest(tensor: Tensor) -> int:
    """Differs between shapes, as good as always; the same in all processes."""
    return hash(tensor.shape) & 0x3FFFFF


def _mark_changed(tensor: Tensor) -> None:
    """Let autograd see that ``tensor`` has changed in place, in case it was saved for backward."""
    try:  # noqa: SIM105 (contextlib.suppress takes longer than a small collective)
        increment_version(tensor)
    except RuntimeError:  # Inference tensors have no version.
        pass
