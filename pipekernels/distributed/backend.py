"""The group of the backend with its collectives on tensors, and the registration of the backend."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from pipekernels._torch_private import (
    disable_dynamo,
    dispatch_mode_count,
    is_profiler_enabled,
    is_seen,
)
from pipekernels.comm.bootstrap.rendezvous import host_identity, over_store
from pipekernels.comm.tensors import put_back, to_dense_in_place
from pipekernels.distributed.collectives import COLLECTIVES, Collective, check_alike, tensors_in
from pipekernels.distributed.group import DONE, ENDED, Group, Work

if TorchVersion(torch.__version__) < "2.7":
    raise ImportError(
        f"the backend 'pipekernels' needs torch 2.7 or newer, this is {torch.__version__}; call "
        "the methods of pipekernels.Communicator instead"
    )


class BackendGroup(Group):
    """A group with the methods of :data:`pipekernels.distributed.collectives.COLLECTIVES`, which
    are added below."""

    def _start(self, call: Collective, method: str, arguments: Sequence[Any], opts: Any) -> Any:
        """The work of ``call``, which torch makes by ``method`` of these arguments and options."""
        # The short way of a small tensor: one native call on this thread. The caller waits or all
        # peers have come, no earlier call is left, and nobody looks.
        if self._is_idle() and not is_profiler_enabled() and not dispatch_mode_count():
            only = arguments[0] if call.arguments == 1 else arguments
            waits = not getattr(opts, "asyncOp", True)
            try:
                if len(only) == call.arguments and call.native(waits, *only):
                    return ENDED if waits else Work(DONE, [only[0]])
            except Exception as error:
                if waits:
                    raise
                self._last = concurrent.futures.Future()
                self._last.set_exception(error)
                return Work(self._last, [only[0]])
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
    def method(self: BackendGroup, *arguments: Any, **fields: Any) -> Any:
        if len(arguments) <= count or not hasattr(arguments[count], "timeout"):
            # Torch calls again with options, or has Gloo do it.
            return getattr(super(BackendGroup, self), name)(*arguments, **fields)
        opts = arguments[count]
        return self._start(collective(self, opts), name, arguments[:count], opts)

    return method


for _collective in COLLECTIVES:
    for _name in _collective.methods:
        setattr(BackendGroup, _name, _method(_collective, _name))


def make_group(options: Any, backend_options: Any) -> Any:
    """What torch calls to make a group, as it is registered with ``extended_api=True``.

    Returns:
        A :class:`BackendGroup` on one host. On several hosts torch's Gloo, to which torch then
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
    return gloo if len(set(hosts)) > 1 else BackendGroup(rendezvous, gloo, timeout, backend_options)


dist.Backend.register_backend("pipekernels", make_group, extended_api=True, devices=["cpu"])
