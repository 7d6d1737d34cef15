"""The ``torch.distributed`` backend ``"pipekernels"``, with faster collectives for CPU tensors.

Where the package is installed, programs name it without an import; where it is not, as in its
source folder, importing this module registers it::

    torch.distributed.init_process_group("pipekernels")

Then ``all_reduce`` (sum, avg, max, min), ``all_gather``, ``reduce_scatter`` and their variants on
one tensor, ``broadcast`` and ``barrier`` run on a :class:`pipekernels.Communicator`, also on
several hosts, and in DDP, FSDP, DTensor and functional collectives. Gloo runs everything else:
other operations and reductions, dtypes that cannot be reduced, sparse tensors. Torch restricts
``monitored_barrier``, and DDP's built-in C++ hook ``FP16_COMPRESS``, to its own backends; the
Python hook of that name works.

Asynchronous calls run one after another on a thread of the group. A lost rank ends the group: its
errors are those of a communicator (:class:`pipekernels.PeerError`, ``TimeoutError``); if torch
waits in C++, as in DDP, they arrive as a ``RuntimeError`` that quotes them.

With ``init_process_group("cpu:pipekernels,cuda:nccl")`` collectives of CUDA tensors run on a second
group, of NCCL, which the first of them makes: all ranks of a group must take part in it. No GPU has
run this yet. Name ``cpu`` first: otherwise torch makes an NCCL backend that nobody uses, and warns
that it was not destroyed. Point-to-point calls of CUDA tensors need ``new_group(backend="nccl")``:
in other groups torch does not join the calls of ``batch_isend_irecv``, and NCCL's might wait for
each other.

Raises:
    ImportError: torch is older than 2.7, which may lose track of a pending call of such a group.
"""

# Torch's C++ calls the methods with lists and options. Its Python code and users may also pass
# single tensors, and fields of the options instead of options.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.torch_version import TorchVersion

from pipekernels._log import info_once
from pipekernels._other_devices import OtherGroups, check_point_to_point, other_device
from pipekernels._torch_private import register_backend
from pipekernels.comm import Communicator
from pipekernels.comm.codes import REDUCIBLE
from pipekernels.comm.deadline import Deadline
from pipekernels.comm.join.rendezvous import meet, over_store
from pipekernels.comm.tensors import put_back, to_dense_in_place

if TorchVersion(torch.__version__) < "2.7":
    raise ImportError(
        f"the backend 'pipekernels' needs torch 2.7 or newer, this is {torch.__version__}; call "
        "the methods of pipekernels.Communicator instead"
    )

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

_DONE: concurrent.futures.Future[None] = concurrent.futures.Future()
_DONE.set_result(None)


class _Work(dist.Work):
    """A call that runs on the group's thread, or has run."""

    def __init__(self, call: concurrent.futures.Future[None], results: list[Tensor]) -> None:
        super().__init__()
        self._call = call
        self._results = results

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the call; raise its error. A timeout of 0 means no timeout."""
        try:
            self._call.result(timeout.total_seconds() or None)
        except concurrent.futures.TimeoutError as error:
            if self._call.done():
                raise
            raise TimeoutError(f"the collective has not ended within {timeout}") from error
        finally:
            del self  # As in _await().
        return True

    def is_completed(self) -> bool:
        return self._call.done()

    def is_success(self) -> bool:
        return self._call.done() and self._call.exception() is None

    def exception(self) -> BaseException | None:
        return self._call.exception() if self._call.done() else None

    def result(self) -> list[Tensor]:
        return _await(self._call, self._results)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        # Raise an error from a callback: only then C++ sees it as an error too.
        ended: torch.futures.Future[None] = torch.futures.Future()
        answer = ended.then(functools.partial(_await, self._call, self._results))
        caller = threading.get_ident()

        def end(call: concurrent.futures.Future[None]) -> None:
            if threading.get_ident() == caller and call.exception() is not None:
                # On another thread: the error's traceback would keep the frames of this one alive,
                # and with them what the caller holds.
                threading.Thread(target=ended.set_result, args=(None,)).start()
            else:
                ended.set_result(None)

        self._call.add_done_callback(end)
        return answer


def _await(
    call: concurrent.futures.Future[None], results: list[Tensor], ended: Any = None
) -> list[Tensor]:
    """Wait for ``call``; returns ``results`` or raises its error. ``ended`` is for callbacks."""
    try:
        call.result()
        return results
    finally:
        del call, results, ended  # A call's error keeps this frame alive through its traceback.


def _run_detached(body: Callable[[], None]) -> None:
    """Run ``body``; drop the traceback of its error, which would keep the group alive."""
    try:
        body()
    except BaseException as error:  # noqa: BLE001
        error.__cause__ = error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904
    finally:
        del body


class _Logged:
    """Gloo's group, where what it runs is to be logged: once for each operation."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        info_once(_log, "Gloo runs %s, for other tensors or reductions than the communicator", name)
        return getattr(self._group, name)


def _forwarded(name: str, *, is_collective: bool = True) -> Callable[..., dist.Work]:
    """The method of this name, of the group that serves the tensors among its arguments."""

    def forward(self: _Group, *args: Any, **fields: Any) -> dist.Work:
        device = other_device([*args, *fields.values()])
        group = self._group_of(device)
        if device is not None and not is_collective:
            check_point_to_point(name, group, device)
        call: Callable[..., dist.Work] = getattr(group, name)
        return call(*args, **fields)

    return forward


class _Group(dist.ProcessGroup):
    """A process group; its Gloo backend serves the methods that it does not override.

    All ranks must choose alike between the communicator and Gloo, so the choice depends only on the
    operation, the dtype and the kind of tensor. The methods have torch's names, old and new.
    """

    def __init__(self, options: Any, backend_options: Any) -> None:
        """Called as torch does for backends registered with ``extended_api=True``."""
        rank, world_size = options.group_rank, options.group_size
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        timeout, seconds = options.timeout, options.timeout.total_seconds()
        deadline = Deadline(seconds)
        # Wait for all ranks before connecting Gloo, which has the timeout of its operations.
        store = meet(options.store, rank, world_size, deadline)
        gloo_store = dist.PrefixStore("gloo", store)
        backend: Any = dist.ProcessGroupGloo(gloo_store, rank, world_size, timeout)
        # For calls of overridden methods that the communicator does not support.
        gloo = dist.ProcessGroup(gloo_store, rank, world_size)
        for group in (self, gloo):
            register_backend(group, _CPU, backend)
        logged = _log.isEnabledFor(logging.INFO)
        self._gloo = cast(dist.ProcessGroup, _Logged(gloo)) if logged else gloo
        rendezvous = over_store(dist.PrefixStore("ranks", store), rank, world_size, deadline)
        self._comm = cast(Communicator, Communicator._join(rendezvous, seconds))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "pipekernels")
        self._thread_id: int | None = None  # Set by its first call.
        self._last = _DONE
        self._others = OtherGroups(timeout, backend_options)

    def getBackendName(self) -> str:
        return "pipekernels"

    def abort(self) -> None:
        self._others.abort()
        self._comm.close()
        self._last = _DONE
        super().abort()

    def shutdown(self) -> None:
        self._others.destroy(self)
        self._comm.close()
        self._last = (
            _DONE  # Its error may keep callers' frames, and through them this group, alive.
        )
        self._thread.shutdown(wait=False)  # Pending calls fail, as the communicator is closed.
        super().shutdown()

    def _run(self, opts: Any, body: Callable[[], None], results: list[Tensor]) -> dist.Work:
        """Run ``body`` after all earlier calls.

        A future's callback may run on the group's thread, which cannot wait for itself: calls from
        there run at once. The order is then the same on all ranks if each callback is added before
        the next call and that call is asynchronous, as in the hooks of DDP.
        """

        def run() -> None:
            with torch.inference_mode():  # Allows writes to all tensors, inference tensors too.
                body()

        def run_on_thread() -> None:
            self._thread_id = threading.get_ident()
            run()

        is_idle = self._last.done() and not getattr(opts, "asyncOp", True)
        if is_idle or threading.get_ident() == self._thread_id:
            run()
            return _Work(_DONE, results)
        self._last = self._thread.submit(_run_detached, run_on_thread)
        return _Work(self._last, results)

    # ---- tensors of other devices ---------------------------------------------------------------

    def _other(self, tensors: Sequence[Any]) -> dist.ProcessGroup:
        """The group that serves a call which the communicator does not, with these tensors."""
        return self._group_of(other_device(tensors))

    def _group_of(self, device: torch.device | None) -> dist.ProcessGroup:
        if device is None or device.type == "cpu":
            return self._gloo
        return self._others.get(self, device)

    def _get_backend(self, device: torch.device) -> Any:
        """Torch also asks for devices that are not in use, and expects a RuntimeError then."""
        other = self._others.made(device)
        try:
            return super()._get_backend(device) if other is None else other._get_backend(device)
        except RuntimeError as error:
            raise RuntimeError(
                f"the group has no backend for {device} before the first collective there; "
                "init_process_group() takes no device_id with this backend"
            ) from error

    def _start_coalescing(self, device: torch.device) -> None:
        self._group_of(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._group_of(device)._end_coalescing(device)

    # ---- reductions ------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _options(dist.AllreduceOptions, opts, timeout, reduceOp=op)
        name = _reduction(tensors, opts)
        if name is None:
            return self._other(tensors).allreduce(tensors, opts)

        def body() -> None:
            for tensor in tensors:
                _in_place(tensor, lambda flat: self._comm.all_reduce(flat, name))

        return self._run(opts, body, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = _options(dist.AllreduceCoalescedOptions, opts)
        if _reduction(tensors, opts) is None:
            return self._other(tensors).allreduce_coalesced(tensors, opts)
        return self.allreduce(tensors, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(dist.ReduceScatterOptions, opts, timeout, reduceOp=op)
        name = _reduction(outputs, opts)
        if name is None:
            return self._other(outputs).reduce_scatter(outputs, inputs, opts)
        self._check_lists("reduce_scatter", inputs)

        def body() -> None:
            for output, slices in zip(outputs, inputs, strict=True):
                if all(part.shape == slices[0].shape for part in slices):
                    self._reduce_scatter(output, torch.stack(slices), name)
                else:
                    self._reduce_scatter_uneven(output, slices, name)

        return self._run(opts, body, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(dist.ReduceScatterOptions, opts)
        op = _reduction(outputs, opts)
        if op is None:
            other = self._other(outputs)
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        for output, input in zip(outputs, inputs, strict=True):
            self._check_sizes("reduce_scatter", output, input, "input")

        def body() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, input, op)

        return self._run(opts, body, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if not output.is_cpu:
            opts = _options(dist.ReduceScatterOptions, opts)
            return self._other([output])._reduce_scatter_base(output, input, opts)
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        rows = input.reshape(self.size(), -1)
        in_place = output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
        if output.is_contiguous() and not in_place:
            self._comm.reduce_scatter(rows, op, out=output.view(1, -1))
        else:
            output.copy_(self._comm.reduce_scatter(rows, op).view(output.shape))

    def _reduce_scatter_uneven(self, output: Tensor, slices: list[Tensor], op: str) -> None:
        whole = self._comm.all_reduce(torch.cat([part.reshape(-1) for part in slices]), op)
        own = whole.split([part.numel() for part in slices])[self.rank()]
        output.copy_(own.view(output.shape))

    def _check_lists(self, call: str, lists: Sequence[Sequence[Tensor]]) -> None:
        for tensors in lists:
            if len(tensors) != self.size():
                raise ValueError(
                    f"{call} needs a list of {self.size()} tensors, one for each rank of the "
                    f"group, got {len(tensors)}"
                )

    def _check_sizes(self, call: str, part: Tensor, whole: Tensor, name: str) -> None:
        if whole.numel() != self.size() * part.numel():
            raise ValueError(
                f"{call} over {self.size()} ranks needs an {name} of {self.size()} x "
                f"{part.numel()} elements, got one of shape {tuple(whole.shape)} beside "
                f"{tuple(part.shape)}"
            )

    # ---- copies ----------------------------------------------------------------------------------

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(AllgatherOptions, opts, timeout)
        if not _is_dense(inputs):
            return self._other(inputs).allgather(outputs, inputs, opts)
        self._check_lists("all_gather", outputs)

        def body() -> None:
            for tensors, input in zip(outputs, inputs, strict=True):
                gathered = self._comm.all_gather(input.reshape(1, -1))
                for tensor, row in zip(tensors, gathered, strict=True):
                    tensor.copy_(row.view(tensor.shape))

        return self._run(opts, body, [tensor for tensors in outputs for tensor in tensors])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(AllgatherOptions, opts)
        if not _is_dense(inputs):
            other = self._other(inputs)
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts)
        for output, input in zip(outputs, inputs, strict=True):
            self._check_sizes("all_gather", input, output, "output")

        def body() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                row = input.reshape(1, -1)
                if output.is_contiguous():
                    self._comm.all_gather(row, out=output.view(self.size(), -1))
                else:
                    output.copy_(self._comm.all_gather(row).view(output.shape))

        return self._run(opts, body, outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if not input.is_cpu:
            opts = _options(AllgatherOptions, opts)
            return self._other([input])._allgather_base(output, input, opts)
        return self.all_gather_single_coalesced([output], [input], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _options(dist.BroadcastOptions, opts, timeout, rootRank=root)
        if not _is_dense(tensors):
            return self._other(tensors).broadcast(tensors, opts)

        def body() -> None:
            for tensor in tensors:
                _in_place(tensor, lambda flat: self._comm.broadcast(flat, opts.rootRank))

        return self._run(opts, body, tensors)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        opts = _options(dist.BarrierOptions, opts, timeout)
        return self._run(opts, self._comm.barrier, [])

    # ---- forwarded -------------------------------------------------------------------------------
    # The base class would call Gloo while it holds the GIL. A thread of Gloo that holds the lock of
    # its queue may need the GIL to free a tensor: a deadlock.

    reduce = _forwarded("reduce")
    gather = _forwarded("gather")
    scatter = _forwarded("scatter")
    allgather_coalesced = _forwarded("allgather_coalesced")
    alltoall = _forwarded("alltoall")
    alltoall_base = all_to_all_single = _forwarded("alltoall_base")
    send = _forwarded("send", is_collective=False)
    recv = _forwarded("recv", is_collective=False)
    recv_anysource = _forwarded("recv_anysource", is_collective=False)


def _options(kind: Any, given: Any, timeout: Any = None, **field: Any) -> Any:
    """The options of a call: ``given``, or new ones whose only ``field`` has the value passed by
    name, or else ``given``."""
    if hasattr(given, "timeout"):
        return given
    options = kind()
    for name, value in field.items():
        value = given if value is None else value
        if value is not None:
            setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def _in_place(tensor: Tensor, collective: Callable[[Tensor], object]) -> None:
    """Run ``collective`` on ``tensor`` as one dimension: torch's backends require equally many
    elements on all ranks, a communicator equal shapes."""
    dense = to_dense_in_place(tensor)
    collective(dense.view(-1))
    put_back(dense, tensor)


def _is_dense(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_cpu and tensor.layout == torch.strided for tensor in tensors)


def _reduction(tensors: Sequence[Tensor], opts: Any) -> str | None:
    """The communicator's name of the reduction; ``None`` if it does not support it."""
    name = next((name for op, name in _REDUCTIONS.items() if opts.reduceOp == op), None)
    if not _is_dense(tensors) or any(tensor.dtype not in REDUCIBLE for tensor in tensors):
        return None
    if name == "avg" and not all(tensor.is_floating_point() for tensor in tensors):
        return None
    return name


dist.Backend.register_backend("pipekernels", _Group, extended_api=True, devices=["cpu"])
