"""The collectives of one rank, and its symmetric memory, on the CPU or its CUDA device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from pipekernels._torch_private import is_profiler_enabled
from pipekernels.comm import messages
from pipekernels.comm.codes import codes, reduction_in
from pipekernels.comm.cuda import CudaBackend
from pipekernels.comm.process_group import ProcessGroupBackend
from pipekernels.comm.shared_memory import SharedMemoryBackend
from pipekernels.comm.tensors import (
    check_has_rows,
    check_reducible,
    check_root,
    check_rows,
    check_tensor,
    mark_changed,
    output_for,
    parts_of,
    put_back,
    to_dense,
    to_dense_in_place,
)
from pipekernels.device.profiling import in_profile

T = TypeVar("T")
CpuBackend: TypeAlias = SharedMemoryBackend | ProcessGroupBackend
DeviceBackend: TypeAlias = CudaBackend | ProcessGroupBackend
# Of a device, and of the backend of the communicator that this one is split off, if there is one.
MakeDeviceBackend: TypeAlias = Callable[[torch.device, DeviceBackend | None], DeviceBackend]


class Collectives:
    """The collectives and memory of :class:`Communicator`, whose docstring has all common errors.

    Args:
        cpu_backend: for CPU tensors.
        make_device_backend: makes that for tensors on the CUDA device, at its first use.
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(
        self,
        cpu_backend: CpuBackend,
        make_device_backend: MakeDeviceBackend,
        rank: int,
        world_size: int,
    ) -> None:
        self._cpu_backend = cpu_backend
        self._make_device_backend = make_device_backend
        self._rank = rank
        self._world_size = world_size
        self._all_reduce_tensor = cpu_backend.all_reduce_tensor
        self._all_gather_tensor = cpu_backend.all_gather_tensor
        self._cuda_backend: DeviceBackend | None = None  # Made at the first use of CUDA.
        self._parent: weakref.ref[Collectives] | None = None  # That it was split off.
        self._lock = threading.Lock()  # Held while ``_cuda_backend`` is made.

    @property
    def rank(self) -> int:
        """This rank, counted from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    def _exchange(self, item: Any, message_type: type[T]) -> list[T]:
        """See :class:`pipekernels.comm.bootstrap.rendezvous.Rendezvous`."""
        return messages.all_gather(item, message_type, self.all_gather, torch.device("cpu"))

    def _backend_for(self, device: torch.device) -> CpuBackend | DeviceBackend:
        return self._cpu_backend if device.type == "cpu" else self._device_backend(device)

    def _device_backend(self, device: torch.device) -> DeviceBackend:
        backend = self._cuda_backend
        if backend is not None and device == backend.device:
            return backend
        # Autograd's threads may come here at the same time; making a backend is a collective.
        with self._lock:
            if self._cuda_backend is None:
                parent = None if self._parent is None else self._parent()
                shared = None if parent is None else parent._cuda_backend
                self._cuda_backend = self._make_device_backend(device, shared)
        used = self._cuda_backend.device
        if device.type != "cuda" or device.index not in (None, used.index):
            raise ValueError(
                f"this rank of the communicator is on {used}, but the tensor on {device}; "
                f"move it with .to({str(used)!r}), or make another communicator"
            )
        return self._cuda_backend

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", order: str = "rank"
    ) -> Tensor:
        """Reduce ``tensor`` elementwise over all ranks, in place.

        Args:
            tensor: any shape, float64, float32, float16, bfloat16, int32 or int64; the same shape
                and dtype on all ranks.
            op: ``'sum'``, ``'avg'`` (of floating-point types), ``'max'`` or ``'min'`` (NaN where a
                rank has NaN). Sums of integers wrap around.
            algorithm: ``'one_shot'``: every rank reads all tensors. ``'two_shot'``: every rank
                reduces its slice and collects its peers' slices. ``'ring'``: chunks travel from
                neighbour to neighbour. ``'auto'``: one of the first two, by size. The result does
                not depend on it. Ignored over several hosts.
            order: of the terms of floating-point sums: ``'rank'``, ``((x0 + x1) + x2) + x3``, or
                ``'tree'``, ``(x0 + x1) + (x2 + x3)``, on one host only, for results that do not
                depend on the number of ranks, see :doc:`/guides/numerics`.

        Returns:
            ``tensor``.

        Raises:
            TypeError: a dtype that cannot be reduced.
            ValueError: an unknown ``op``, ``algorithm`` or ``order``, ``'avg'`` of integers, or
                tree order over several hosts.
        """
        # One native call does everything: Python would take longer than a small reduction.
        if not is_profiler_enabled() and self._all_reduce_tensor(tensor, op, algorithm, order):
            return tensor
        check_tensor(tensor)
        check_reducible(tensor, op, algorithm, order)
        dense = to_dense_in_place(tensor)
        with in_profile("all_reduce of %d bytes, %s", dense.nbytes, algorithm):
            backend = self._backend_for(tensor.device)
            backend.all_reduce(dense, reduction_in(op, order), algorithm)
        return put_back(dense, tensor)

    def reduce_scatter(
        self, input: Tensor, op: str = "sum", *, out: Tensor | None = None, order: str = "rank"
    ) -> Tensor:
        """Reduce ``input`` elementwise over all ranks, and return this rank's slice.

        Args:
            input: ``[world_size * k, ...]``, a dtype as for :meth:`all_reduce`; the same shape and
                dtype on all ranks.
            op: as for :meth:`all_reduce`.
            out: for the result; a new tensor if ``None``. Contiguous, no overlap with ``input``.
            order: as for :meth:`all_reduce`.

        Returns:
            ``[k, ...]``: rows ``rank * k`` to ``(rank + 1) * k`` of the reduction.

        Raises:
            TypeError: a dtype that cannot be reduced.
            ValueError: a first dimension that ``world_size`` does not divide, an unknown ``op`` or
                ``order``, ``'avg'`` of integers, an ``out`` that does not fit the result, or tree
                order over several hosts.
        """
        check_tensor(input)
        check_reducible(input, op, order=order)
        check_rows(input, self._world_size)
        dense = to_dense(input)
        rows = input.shape[0] // self._world_size
        output = output_for(dense, (rows, *input.shape[1:]), out)
        with in_profile("reduce_scatter of %d bytes", dense.nbytes):
            self._backend_for(input.device).reduce_scatter(dense, output, reduction_in(op, order))
        if out is not None:
            mark_changed(out)
        return output

    def all_gather(self, input: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The inputs of all ranks, concatenated along the first dimension in rank order.

        Args:
            input: ``[k, ...]``, any dtype; the same shape and dtype on all ranks.
            out: for the result; a new tensor if ``None``. Contiguous; ``input`` may be this rank's
                rows of it, but must not overlap it otherwise.

        Returns:
            ``[world_size * k, ...]``.

        Raises:
            ValueError: ``input`` has no dimension, or ``out`` does not fit the result.
        """
        check_tensor(input)
        check_has_rows(input)
        shape = (self._world_size * input.shape[0], *input.shape[1:])
        output = out
        if output is None:
            output = torch.empty(shape, dtype=input.dtype, device=input.device)
        # As in all_reduce().
        if not is_profiler_enabled() and self._all_gather_tensor(input, output):
            return output
        dense = to_dense(input)
        output = output_for(dense, shape, output, self._rank * dense.nbytes)
        with in_profile("all_gather of %d bytes", output.nbytes):
            self._backend_for(input.device).all_gather(dense, output)
        if out is not None:
            mark_changed(out)
        return output

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Copy ``tensor`` of rank ``src`` to ``tensor`` of all ranks, in place.

        Args:
            tensor: any shape and dtype, the same on all ranks.
            src: the rank that sends.

        Returns:
            ``tensor``.

        Raises:
            ValueError: there is no rank ``src``.
        """
        check_tensor(tensor)
        check_root(src, self._world_size)
        dense = to_dense_in_place(tensor)
        with in_profile("broadcast of %d bytes", dense.nbytes):
            self._backend_for(tensor.device).broadcast(dense, src)
        return put_back(dense, tensor)

    def all_to_all(
        self,
        input: Tensor,
        *,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Send each rank its rows of ``input``, and return what all ranks send to this one.

        Args:
            input: CPU tensor, ``[sum(input_sizes), ...]``, any dtype, the same on all ranks.
            input_sizes: the rows for each rank; equally many if ``None``.
            output_sizes: the rows from each rank, as many as that rank sends; otherwise likewise.
            out: for the result; a new tensor if ``None``. Contiguous, no overlap with ``input``.

        Returns:
            ``[sum(output_sizes), ...]``: the rows from rank 0, from rank 1 and so on.

        Raises:
            ValueError: sizes or an ``out`` that do not fit; or, on all ranks, a rank sends another
                number of bytes than its peer receives.
        """
        backend = self._host_backend(input)
        check_has_rows(input)
        dense = to_dense(input)
        inputs = parts_of(dense, input_sizes, self._world_size)
        sizes = [len(each) for each in inputs] if output_sizes is None else output_sizes
        output = output_for(dense, (sum(sizes), *input.shape[1:]), out)
        outputs = parts_of(output, sizes, self._world_size)
        with in_profile("all_to_all of %d bytes", dense.nbytes):
            backend.all_to_all(outputs, inputs)
        if out is not None:
            mark_changed(out)
        return output

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dst``; return when it has called :meth:`recv` for it.

        Not a collective: the other ranks need not take part. Messages with one tag arrive in order.

        Args:
            tensor: CPU tensor, any shape and dtype.
            dst: another rank.
            tag: 0 to 2**32 - 1.

        Raises:
            ValueError: no such rank; or, on both ranks, tensors of different numbers of bytes.
        """
        backend = self._host_backend(tensor)
        check_root(dst, self._world_size, "dst")
        backend.send(to_dense(tensor), dst, tag).wait()

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Store what :meth:`send` of rank ``src`` sends, by default of any rank, in ``tensor``.

        Arguments and errors as for :meth:`send`.

        Returns:
            The rank that has sent.
        """
        backend = self._host_backend(tensor)
        if src is not None:
            check_root(src, self._world_size)
        dense = to_dense_in_place(tensor)
        message = backend.receive(dense, src, tag)
        message.wait()
        put_back(dense, tensor)
        return message._source_rank()

    def _host_backend(self, tensor: Tensor) -> CpuBackend:
        check_tensor(tensor)
        if not tensor.is_cpu:
            raise ValueError(
                f"messages and all_to_all of a communicator are for CPU tensors, got one on "
                f"{tensor.device}; use torch.distributed with NCCL"
            )
        return self._cpu_backend

    def barrier(self) -> None:
        """Return when all ranks have called it. Does not wait for work on a device."""
        if self._cuda_backend is not None:
            self._cuda_backend.check()
        self._cpu_backend.barrier()

    def synchronize(self) -> None:
        """Wait until this rank's collectives on its CUDA device have ended.

        For collectives in a replayed CUDA graph, first synchronise the stream of the replay. On the
        CPU, collectives have ended when they return.

        Raises:
            ValueError, PeerError, TimeoutError: one of the collectives failed.
        """
        if self._cuda_backend is not None:
            self._cuda_backend.synchronize()

    def empty(
        self,
        *shape: int | Iterable[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """An uninitialised tensor in memory that the peers can access: a symmetric tensor.

        Not a collective, except at the first use of CUDA. The memory stays allocated while the
        tensor or a view of it exists, also after :meth:`close`. On CPUs, processes forked later
        share it: clone tensors that they are to write to. On CUDA it belongs to the current stream,
        as torch's own memory does.

        Args:
            shape: sizes, one by one or as one sequence.
            dtype: any.
            device: the CPU if ``None``, or this rank's CUDA device, see :doc:`/guides/cuda`.

        Raises:
            TypeError: ``dtype`` is not a dtype.
            ValueError: a negative size.
            RuntimeError: the symmetric memory is exhausted, the ranks are on several hosts, or the
                communicator has been closed. On CUDA also while a graph is being captured.
        """
        one_argument = len(shape) == 1 and isinstance(shape[0], Iterable)
        sizes = torch.Size(cast("Iterable[int]", shape[0] if one_argument else shape))
        if sizes and min(sizes) < 0:
            raise ValueError(f"sizes must not be negative, got {tuple(sizes)}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        if device is None:
            return self._cpu_backend.empty(sizes, dtype)
        return self._backend_for(torch.device(device)).empty(sizes, dtype)

    def output(self, shape: Iterable[int], like: Tensor) -> Tensor:
        """As :meth:`empty`, of the dtype and on the device of ``like``; for results.

        On CUDA an ordinary tensor if symmetric memory is used up. Memory that a result gets while a
        graph is captured is the graph's, and is reused only by results of the same capture.

        Raises:
            ValueError: ``like`` is on a device that this rank does not use.
        """
        check_tensor(like)
        if like.is_cpu:  # First: a small product takes as long as a few calls.
            return self._cpu_backend.output(torch.Size(shape), like.dtype)
        if not like.is_cuda:
            raise ValueError(
                f"the memory of this communicator is on cpu, but the input on {like.device}; move "
                "it with .to('cpu')"
            )
        return self._device_backend(like.device).output(torch.Size(shape), like.dtype)


def sum_of_outputs(comm: Collectives, output: Tensor) -> Tensor:
    """``comm.all_reduce(output)`` of a new tensor from ``comm.output()``, without the checks that
    such a tensor passes, and unknown to autograd."""
    if output.is_cpu or output.dtype not in codes().reducible or is_profiler_enabled():
        return comm.all_reduce(output)
    comm._device_backend(output.device).all_reduce(output, "sum", "auto")
    return output
