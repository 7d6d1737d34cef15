"""The backend of ``torch.distributed``: its groups, and its registration."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from pipekernels._torch_private import (
    TorchDispatchMode,
    below_modes,
    disable_dynamo,
    dispatch_mode_count,
    end_with,
    is_profiler_enabled,
    is_seen,
    register_backend,
)
from pipekernels.comm.bootstrap.rendezvous import Rendezvous, host_identity, over_store
from pipekernels.comm.communicator import Communicator
from pipekernels.comm.cuda import MOST_BLOCKS
from pipekernels.comm.messages import backends_of
from pipekernels.comm.shared_memory import SharedMemoryBackend
from pipekernels.comm.tensors import put_back, to_dense_in_place
from pipekernels.device.profiling import in_profile
from pipekernels.distributed.collectives import COLLECTIVES, Collective, check_alike, tensors_in
from pipekernels.distributed.messages import point_to_point
from pipekernels.distributed.work import DONE, ENDED, Call, Calls, Work

if TorchVersion(torch.__version__) < "2.7":
    raise ImportError(
        f"the backend 'pipekernels' needs torch 2.7 or newer, this is {torch.__version__}; call "
        "the methods of pipekernels.Communicator instead"
    )

_CPU = torch.device("cpu")
MOST_OF_SHORT = 64 << 10  # Bytes of the results of a call.


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
    """A process group over shared memory; the methods of :data:`COLLECTIVES` are added below. Gloo
    serves what it does not override.

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
        self._calls = Calls()
        self._dropped: list[tuple[Any, Tensor]] = []  # See distributed/messages.py.
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
        self._calls.shutdown()  # Pending calls fail, as the communicator is closed.
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

    def _start(self, call: Collective, method: str, arguments: Sequence[Any], opts: Any) -> Any:
        """The work of ``call``, which torch makes by ``method`` of these arguments and options."""
        # The short way of a small tensor: one native call on this thread. The caller waits or all
        # peers have come, no earlier call is left, and nobody looks.
        if self._calls.are_done() and not is_profiler_enabled() and not dispatch_mode_count():
            only = arguments[0] if call.arguments == 1 else arguments
            waits = not getattr(opts, "asyncOp", True)
            try:
                if len(only) == call.arguments and call.native(waits, *only):
                    return ENDED if waits else Work(DONE, [only[0]])
            except Exception as error:
                if waits:
                    raise
                self._calls.last = Call()
                self._calls.last.set_exception(error)
                return Work(self._calls.last, [only[0]])
        # The last tensor, which all ranks give, decides who serves the call: all must agree.
        parts = _parts_of(arguments, call.has_parts)
        tensors = tensors_in(parts[-1][:2]) if parts else []
        if tensors and not (tensors[-1].is_cpu and tensors[-1].layout == torch.strided):
            return getattr(self._group_of(tensors[-1].device), method)(*arguments, opts)

        def serve(parts: list[list[Any]]) -> dist.Work:
            results = tensors_in([part[0] for part in parts])
            return self._run(opts, lambda: _run(call, parts), results, call.name)

        if not is_seen(tensors):
            return serve(parts)

        def serve_operator(of_operator: Sequence[Any]) -> dist.Work:
            # Of the operator's arguments, tensors come first.
            seen = (*of_operator[:2], *arguments[2:])[: call.arguments]
            return serve(_parts_of(seen, call.has_parts))

        return self._shown(method, (*arguments, opts), serve_operator)

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
        at_once = not getattr(opts, "asyncOp", True) and self._calls.are_done()
        size = sum([result.nbytes for result in results])
        with in_profile("%s of %d bytes", name, size) as shown:
            # A future's callback runs on the thread of its call, which cannot wait for itself.
            # Calls from there have one order on all ranks if each callback is added before the next
            # call and that call is asynchronous, as in the hooks of DDP.
            if at_once or self._calls.are_here():
                body()
                return ENDED if at_once else Work(DONE, results)
            work = Work(self._calls.add(body, size <= MOST_OF_SHORT), results, self._calls)
            if shown is not None:  # The range of the profiler lasts as long as the call.
                end_with(shown, work.get_future())
        return work

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
        """On CPUs the calls in between have begun one by one; the work is that of the last."""
        if device.type == "cpu":
            return Work(self._calls.last, [], self._calls)
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


def _parts_of(arguments: Sequence[Any], has_parts: bool) -> list[list[Any]]:
    """The arguments of each part of a call: tensors, and copies of lists. An argument that a rank
    does not give is an empty list."""
    parts: list[Any] = [arguments]
    if has_parts and not isinstance(arguments[0], Tensor):
        parts = list(zip_longest(*arguments, fillvalue=()))
    # Lists are copied: the caller may change them before an asynchronous call runs.
    return [[each if isinstance(each, Tensor) else [*each] for each in part] for part in parts]


def _run(call: Collective, parts: list[list[Any]]) -> None:
    # All checks come first: if one part is refused, none has started.
    if len(parts) > 1:
        check_alike(call.name, parts)
    for part in parts:
        call.check(*part)
    with torch.inference_mode():  # Allows writes to its tensors.
        for result, *inputs in parts:
            if call.native(True, result, *inputs):
                continue
            if call.copies:
                call.run(result, *inputs)
                continue
            # A communicator takes dense tensors only. A strided result gets the values afterwards.
            results = result if isinstance(result, list) else [result]
            dense = list(map(to_dense_in_place, results))
            call.run(dense if results is result else dense[0], *inputs)
            for each, tensor in zip(dense, results, strict=True):
                put_back(each, tensor)


def _method(collective: type[Collective], name: str) -> Callable[..., dist.Work]:
    count = collective.arguments

    @disable_dynamo
    def method(self: Group, *arguments: Any, **fields: Any) -> Any:
        if len(arguments) <= count or not hasattr(arguments[count], "timeout"):
            # Torch calls again with options, or has Gloo do it.
            return getattr(super(Group, self), name)(*arguments, **fields)
        opts = arguments[count]
        return self._start(collective(self._comm, opts), name, arguments[:count], opts)

    return method


for _collective in COLLECTIVES:
    for _name in _collective.methods:
        setattr(Group, _name, _method(_collective, _name))


def make_group(options: Any, backend_options: Any) -> Any:
    """What torch calls to make a group, as it is registered with ``extended_api=True``.

    Returns:
        A :class:`Group` on one host. On several hosts torch's Gloo, to which torch then
        hands all calls itself, and nothing of this package runs in them.
    """
    rank, timeout = options.group_rank, options.timeout
    # The store brings the ranks together once, for Gloo and for the communicator. Gloo connects
    # with the timeout of its operations, so all ranks are waited for before.
    seconds = timeout.total_seconds()
    rendezvous = over_store(options.store, rank, options.group_size, seconds)
    hosts = rendezvous.all_gather(host_identity(), tuple[str, ...])
    gloo_store = dist.PrefixStore("gloo", cast(dist.Store, rendezvous.store))
    gloo = dist.ProcessGroupGloo(gloo_store, rank, options.group_size, timeout)
    return gloo if len(set(hosts)) > 1 else Group(rendezvous, gloo, timeout, backend_options)


dist.Backend.register_backend("pipekernels", make_group, extended_api=True, devices=["cpu"])
