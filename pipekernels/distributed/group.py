"""A process group of ``torch.distributed``: its communicator, its thread, and Gloo beside them."""

from __future__ import annotations

import concurrent.futures
import datetime
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._torch_private import (
    TorchDispatchMode,
    below_modes,
    disable_dynamo,
    dispatch_mode_count,
    is_seen,
    register_backend,
)
from pipekernels.comm.bootstrap.rendezvous import Rendezvous
from pipekernels.comm.communicator import Communicator
from pipekernels.comm.cuda import MOST_BLOCKS
from pipekernels.comm.messages import backends_of
from pipekernels.comm.shared_memory import SharedMemoryBackend
from pipekernels.device.profiling import in_profile
from pipekernels.distributed.messages import point_to_point

DONE: concurrent.futures.Future[None] = concurrent.futures.Future()
DONE.set_result(None)


class Work(dist.Work):
    """A call that runs on the group's thread, or has run. ``follow`` is called when callbacks have
    been added to a call that is left."""

    def __init__(
        self,
        call: concurrent.futures.Future[None],
        results: list[Tensor],
        follow: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._call = call
        self._results = results
        self._follow = follow

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the call; raise its error. A timeout of 0 means no timeout."""
        try:
            self._call.result(timeout.total_seconds() or None)
        except concurrent.futures.TimeoutError as error:
            if self._call.done():  # The collective's own error: a rank is late.
                raise
            raise TimeoutError(f"the collective has not ended within {timeout}") from error
        return True

    def is_completed(self) -> bool:
        return self._call.done()

    def is_success(self) -> bool:
        return self._call.done() and self._call.exception() is None

    def exception(self) -> BaseException | None:
        return self._call.exception() if self._call.done() else None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        ended: torch.futures.Future[None] = torch.futures.Future()
        # Raise an error from a callback: only then does C++ see it as an error.
        answer = ended.then(lambda _: self.result())
        is_left = not self._call.done()
        self._call.add_done_callback(lambda _: ended.set_result(None))
        if is_left:
            self._follow()
        return answer


class _Ended(dist.Work):
    """A call that has ended, for callers that only wait."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


ENDED = _Ended()
_CPU = torch.device("cpu")


class _Served(TorchDispatchMode):
    """Has ``serve`` run an operator of c10d on its arguments, in place of Gloo."""

    def __init__(self, serve: Callable[[Sequence[Any]], dist.Work]) -> None:
        super().__init__()
        self._serve = serve
        self.work: dist.Work | None = None  # What ``serve`` has returned.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if types and dispatch_mode_count() == 0:
            return NotImplemented  # The class of these tensors calls again, with what they wrap.
        if func.namespace != "c10d" or dispatch_mode_count() > 0:
            return func(*args, **(kwargs or {}))  # A mode of torch's own has other results.
        self.work = self._serve(args)
        boxed: Any = self.work.boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


class Group(dist.ProcessGroup):
    """A process group without its collectives on tensors. Gloo serves what it does not override.

    All ranks must choose the same of communicator and Gloo, so the choice depends only on the
    operation and on the tensor's device and layout.
    """

    def __init__(
        self, rendezvous: Rendezvous, gloo: Any, timeout: datetime.timedelta, backend_options: Any
    ) -> None:
        rank, world_size = rendezvous.rank, rendezvous.world_size
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        # For calls of overridden methods that the communicator does not support: operators, which
        # modes see. Calls that they have seen use the backend itself.
        self._gloo = dist.ProcessGroup(cast(dist.Store, rendezvous.store), rank, world_size)
        self._gloo_backend = gloo
        for group in (self, self._gloo):
            register_backend(group, _CPU, gloo)
        seconds = timeout.total_seconds()
        self._comm = cast(Communicator, Communicator._join(rendezvous, seconds, MOST_BLOCKS))
        self._backend = cast(SharedMemoryBackend, self._comm._cpu_backend)
        # Asynchronous calls run on one thread, so in the order in which they were made.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "pipekernels")
        self._thread_id: int | None = None  # Set by its first call.
        self._process = os.getpid()
        self._dropped: list[tuple[Any, Tensor]] = []  # See distributed/messages.py.
        self._last = DONE  # The latest call on the thread; DONE if all have ended.
        self._timeout = timeout
        self._backend_options = backend_options
        self._device_groups: dict[str, dist.ProcessGroup] = {}  # By type of device.

    def getBackendName(self) -> str:
        return "pipekernels"

    def abort(self) -> None:
        for group in self._device_groups.values():
            group.abort()
        self._comm.close()
        super().abort()

    def shutdown(self) -> None:
        groups, self._device_groups = self._device_groups, {}
        for group in groups.values() if self is not dist.group.WORLD else ():
            dist.destroy_process_group(group)  # With the default group torch does that itself.
        self._comm.close()
        self._thread.shutdown(wait=False)  # Pending calls fail, as the communicator is closed.
        super().shutdown()

    @disable_dynamo
    def barrier(  # type: ignore[override] # The two overloads of torch.
        self, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        def serve(_: Sequence[Any]) -> dist.Work:
            return self._run(opts, self._comm.barrier, [], "barrier")

        if opts is None:  # Torch calls again with options.
            return super().barrier(*() if timeout is None else (timeout,))
        return self._shown("barrier", (opts,), serve) if is_seen(()) else serve(())

    def _shown(
        self, method: str, arguments: Sequence[Any], serve: Callable[[Sequence[Any]], dist.Work]
    ) -> dist.Work:
        """Call ``serve`` as torch calls a backend: by an operator, with the operator's arguments,
        unless a mode that observes operators takes the call. Returns the work."""
        served = _Served(serve)
        with below_modes(served):
            work: dist.Work = getattr(self._gloo, method)(*arguments)
        return served.work or work

    def _run(
        self, opts: Any, body: Callable[[], object], results: list[Tensor], name: str
    ) -> dist.Work:
        """Run ``body``, the collective ``name``, after all earlier calls; at once if none of them
        is left and the caller waits."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this group belongs to the process that made it, and cannot be used in a forked "
                "child; make a new one there"
            )
        at_once = not getattr(opts, "asyncOp", True) and self._is_idle()
        # Its thread ends a range: torch's profiler would let another thread write to freed memory.
        with in_profile("%s of %d bytes", name, sum([result.nbytes for result in results])):
            # A future's callback may run on the group's thread, which cannot wait for itself. Calls
            # from there have one order on all ranks if each callback is added before the next call
            # and that call is asynchronous, as in the hooks of DDP.
            if at_once or threading.get_ident() == self._thread_id:
                body()
                return ENDED if at_once else Work(DONE, results)
            self._last = self._thread.submit(self._run_on_thread, body)
            return Work(self._last, results, self._follow)

    def _is_idle(self) -> bool:
        """Whether the thread has ended all calls, with their callbacks."""
        if self._last is not DONE and self._last.done():
            self._last = DONE
        return self._last is DONE

    def _follow(self) -> None:
        self._last = self._thread.submit(lambda: None)  # After the callbacks.

    def _run_on_thread(self, body: Callable[[], object]) -> None:
        self._thread_id = threading.get_ident()
        body()

    # ---- tensors of other devices ---------------------------------------------------------------
    # Torch's loop over "cpu:pipekernels,cuda:nccl" ends at a backend that is a whole group, as ours
    # is. So each other device has a second group, of the backend that the string names for it, made
    # at the first call: only then torch knows what the string names.

    def _group_of(self, device: torch.device) -> dist.ProcessGroup:
        """All ranks make a group for another device together. ValueError if no backend is named."""
        if device.type == "cpu":
            return self._gloo
        if device.type not in self._device_groups:
            config = dist.get_backend_config(self)
            name = backends_of(self).get(device.type, "pipekernels")
            if name == "pipekernels":
                raise ValueError(
                    f"the group's backends are {config!r}, and none of them takes tensors on "
                    f"{device.type}: name one for each device, as in "
                    "init_process_group('cpu:pipekernels,cuda:nccl')"
                )
            ranks = dist.get_process_group_ranks(self)
            options: dict[str, Any] = {"use_local_synchronization": True}
            if ranks != sorted(ranks):  # Where torch can leave them unsorted, it has this argument.
                options["sort_ranks"] = False
            backend = f"{device.type}:{name}"
            self._device_groups[device.type] = dist.new_group(
                ranks, self._timeout, backend, self._backend_options, **options
            )
        return self._device_groups[device.type]

    def _get_backend(self, device: torch.device) -> Any:
        other = self._device_groups.get(device.type)
        return super()._get_backend(device) if other is None else other._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._group_of(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """On CPUs the calls in between have begun one by one; returns the work of the last one."""
        if device.type == "cpu":
            return Work(self._last, [])
        return self._group_of(device)._end_coalescing(device)

    # ---- forwarded -------------------------------------------------------------------------------
    # The base class would call Gloo while it holds the GIL. A thread of Gloo that holds the lock of
    # its queue may need the GIL to free a tensor: a deadlock.

    @disable_dynamo
    def allgather_coalesced(self, outputs: Any, inputs: list[Tensor], *options: Any) -> dist.Work:
        return self._group_of(inputs[0].device).allgather_coalesced(outputs, inputs, *options)

    send = point_to_point("send")
    recv = point_to_point("recv")
    recv_anysource = point_to_point("recv_anysource")
