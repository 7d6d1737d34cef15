"""The collectives of the backend, and its registration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from operator import attrgetter
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
from pipekernels.comm.bootstrap.rendezvous import Deadline, host_identity, over_store
from pipekernels.comm.tensors import check_dense, put_back, to_dense, to_dense_in_place
from pipekernels.distributed import derived
from pipekernels.distributed.group import DONE, ENDED, Group

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PREMUL_SUM: "premul_sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}


def parts_of(given: Sequence[Any], is_one: bool) -> list[list[Any]]:
    """The parts of a call: a tensor, or a copy of a list, for each argument. Those that a rank does
    not give are empty lists. Either the arguments ``given`` are those of the only part, as they are
    if ``is_one`` or the first is a tensor, or each is a list with an entry per part."""
    if is_one or isinstance(given[0], Tensor):
        parts = [given]
    else:
        parts = list(zip_longest(*given, fillvalue=()))
    # Lists are copied: the caller may change them before an asynchronous call runs.
    return [[each if isinstance(each, Tensor) else [*each] for each in part] for part in parts]


def tensors_in(arguments: Iterable[Tensor | list[Tensor]]) -> list[Tensor]:
    """Those among ``arguments`` and in lists there."""
    found: list[Tensor] = []
    for each in arguments:
        found += each if isinstance(each, list) else (each,)
    return found


def reduction_of(opts: Any) -> tuple[str, Any]:
    """The name of the reduction, and the factor of its terms, None without one."""
    op = opts.reduceOp
    name = _REDUCTIONS[op.op]
    return name, op.__getstate__()[1] if name == "premul_sum" else None


def check_parts(call: str, parts: Sequence[Tensor], count: int, like: Tensor | None = None) -> None:
    """Raise ValueError unless there are ``count`` tensors, of the size, dtype and device of
    ``like`` if that is given."""
    if len(parts) != count:
        raise ValueError(
            f"{call} needs a list of {count} tensors, one for each rank of the group, "
            f"got {len(parts)}"
        )
    for part in parts:
        if like is not None and _summary(part) != _summary(like):
            raise ValueError(
                f"{call} needs a list of tensors of the size, dtype and device of that beside it, "
                f"{_summary(like)}, got {_summary(part)}"
            )


def check_rows(call: str, ranks: int, whole: Tensor, part: Tensor) -> None:
    """Raise ValueError unless ``whole`` has the elements of ``ranks`` tensors like ``part``."""
    if whole.numel() != ranks * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{call} over {ranks} ranks needs {ranks} x {part.numel()} elements of {part.dtype}, "
            f"got {whole.numel()} of {whole.dtype}"
        )


def check_alike(call: str, parts: Sequence[Sequence[Any]]) -> None:
    """Raise ValueError unless the tensors of all parts are on the CPU, and can be read or, as
    results, be written."""
    for result, *inputs in parts:
        for tensor in tensors_in([result, *inputs]):
            if not tensor.is_cpu:
                raise ValueError(
                    f"{call} of several tensors needs all of them on one device, got one on the "
                    f"CPU and one on {tensor.device}; make a call for each device"
                )
            check_dense(tensor)
        for tensor in tensors_in([result]):
            to_dense_in_place(tensor)


def _summary(tensor: Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.numel(), tensor.dtype, tensor.device


if TorchVersion(torch.__version__) < "2.7":
    raise ImportError(
        f"the backend 'pipekernels' needs torch 2.7 or newer, this is {torch.__version__}; call "
        "the methods of pipekernels.Communicator instead"
    )


class BackendGroup(Group):
    """A group with its collectives on tensors, which are added below."""


def _collective(
    name: str,  # For the profiler.
    method_names: str = "",  # Torch's, old and new; `name` if empty.
    *,
    arguments: int = 2,  # How many come before the options.
    read: Callable[[Any], Any] | None = None,  # Makes the `value` of torch's options, at the call.
    check: Callable[..., None] = lambda *_: None,  # Raises if ``run`` would refuse a part.
    native: Callable[..., bool] = lambda *_: False,  # Tries a native call; whether it was made.
    is_one: bool = False,  # The arguments are those of the only part, not lists for several.
    copies: bool = False,  # `run` copies to its results, which may be strided then.
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make methods of ``run(group, value, result, *inputs)``, which runs once all earlier calls
    have ended, for each part of a call. A result, and each of a list of results, is dense there."""

    def method_of(method_name: str, run: Callable[..., None]) -> Callable[..., dist.Work]:
        runs = run if copies else partial(_run_on_dense, run)

        @disable_dynamo
        def method(self: BackendGroup, *given: Any, **fields: Any) -> dist.Work:
            work: dist.Work
            if len(given) <= arguments or not hasattr(given[arguments], "timeout"):
                # Torch calls again with options, or has Gloo do it.
                work = getattr(super(BackendGroup, self), method_name)(*given, **fields)
                return work
            opts, calls = given[arguments], self._backend.core
            value = None if read is None else read(opts)
            # The short way of a small tensor: one native call on this thread.
            if (
                self._last is DONE
                and not getattr(opts, "asyncOp", True)
                and not is_profiler_enabled()
                and not dispatch_mode_count()
            ):  # The caller waits, no earlier call is left, and nobody looks.
                only = given[0] if arguments == 1 else given[:arguments]
                if len(only) == arguments and native(calls, value, *only):
                    return ENDED
            # The last tensor, which all ranks give, decides who serves the call: all must agree.
            parts = parts_of(given[:arguments], is_one)
            tensors = tensors_in(parts[-1][:2]) if parts else []
            if tensors and not (tensors[-1].is_cpu and tensors[-1].layout == torch.strided):
                work = getattr(self._group_of(tensors[-1].device), method_name)(*given)
                return work

            def serve(parts: list[list[Any]]) -> dist.Work:
                def body() -> None:
                    # All checks come first: if one part is refused, none has started.
                    if len(parts) > 1:
                        check_alike(name, parts)
                    for part in parts:
                        check(self, value, *part)
                    with torch.inference_mode():  # Allows writes to its tensors.
                        for result, *inputs in parts:
                            if not native(calls, value, result, *inputs):
                                runs(self, value, result, *inputs)

                return self._run(opts, body, tensors_in([part[0] for part in parts]), name)

            if is_seen(tensors):
                # Of the operator's arguments, tensors come first.
                return self._shown(
                    method_name,
                    given,
                    lambda args: serve(parts_of((*args[:2], *given[2:])[:arguments], is_one)),
                )
            return serve(parts)

        return method

    def add(run: Callable[..., None]) -> Callable[..., None]:
        for method_name in (method_names or name).split():
            setattr(BackendGroup, method_name, method_of(method_name, run))
        return run

    return add


def _run_on_dense(
    run: Callable[..., None], group: Group, value: Any, result: Tensor | list[Tensor], *inputs: Any
) -> None:
    # A communicator takes dense tensors only. A strided result gets the values afterwards.
    results = result if isinstance(result, list) else [result]
    dense = list(map(to_dense_in_place, results))
    run(group, value, dense if results is result else dense[0], *inputs)
    for each, tensor in zip(dense, results, strict=True):
        put_back(each, tensor)


# Torch's backends require equally many elements on all ranks, a communicator equal shapes: so it
# gets tensors of one dimension.

# ---- reductions: the value is the operation and the factor of its terms --------------------------


@_collective(
    "all_reduce",
    "allreduce allreduce_coalesced",
    arguments=1,
    read=reduction_of,
    check=derived.check,
    native=lambda calls, value, x: value[1] is None and calls.all_reduce_flat(x, value[0]),
)
def _all_reduce(group: Group, value: Any, tensor: Tensor) -> None:
    derived.all_reduce(group._comm, tensor.view(-1), *value)


@_collective(
    "reduce",
    arguments=1,
    read=lambda opts: (*reduction_of(opts), opts.rootRank),
    check=derived.check,
)
def _reduce(group: Group, value: Any, tensor: Tensor) -> None:
    derived.reduce(group._comm, tensor.view(-1), *value)


def _check_input(group: Group, value: Any, output: Tensor, input: Tensor) -> None:
    check_rows("reduce_scatter", group.size(), input, output)
    derived.check(group, value, output)


@_collective(
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced "
    "_reduce_scatter_base reduce_scatter_single",
    read=reduction_of,
    check=_check_input,
    native=lambda calls, value, y, x: (
        value[1] is None and calls.reduce_scatter_flat(x, y, value[0])
    ),
)
def _reduce_scatter(group: Group, value: Any, output: Tensor, input: Tensor) -> None:
    derived.reduce_scatter(group._comm, output.view(-1), to_dense(input).view(-1), *value)


def _check_inputs(group: Group, value: Any, output: Tensor, inputs: list[Tensor]) -> None:
    check_parts("reduce_scatter", inputs, group.size())
    check_parts("reduce_scatter", [inputs[group.rank()]], 1, output)
    derived.check(group, value, output)


@_collective("reduce_scatter", read=reduction_of, check=_check_inputs)
def _reduce_scatter_list(group: Group, value: Any, output: Tensor, inputs: list[Tensor]) -> None:
    whole, sizes = torch.cat([x.reshape(-1) for x in inputs]), [x.numel() for x in inputs]
    if len(set(sizes)) == 1:
        return _reduce_scatter(group, value, output, whole)
    # Ranks get slices of different sizes, which no native call has: each takes its own of the sum.
    group._backend.announce("reduce_scatter", whole, value[0])
    derived.all_reduce(group._comm, whole, *value)
    output.copy_(whole.split(sizes)[group.rank()].view(output.shape))


# ---- copies: the value is the root, if there is one ----------------------------------------------

_root_of = attrgetter("rootRank")


@_collective(
    "broadcast",
    arguments=1,
    read=_root_of,
    native=lambda calls, root, x: calls.broadcast_flat(x, root),
)
def _broadcast(group: Group, root: int, tensor: Tensor) -> None:
    group._comm.broadcast(tensor.view(-1), root)


@_collective(
    "all_gather",
    "allgather_into_tensor_coalesced all_gather_single_coalesced _allgather_base all_gather_single",
    check=lambda group, _, y, x: check_rows("all_gather", group.size(), y, x),
    native=lambda calls, _, y, x: calls.all_gather_flat(x, y),
)
def _all_gather(group: Group, _: None, output: Tensor, input: Tensor) -> None:
    group._comm.all_gather(input.reshape(-1), out=output.view(-1))


@_collective(
    "all_gather",
    "allgather",
    check=lambda group, _, outputs, x: check_parts("all_gather", outputs, group.size(), x),
    copies=True,
)
def _all_gather_list(group: Group, _: None, outputs: list[Tensor], input: Tensor) -> None:
    # Into one tensor, as a communicator gathers; a list of tensors has no common memory.
    for row, output in zip(group._comm.all_gather(input.reshape(1, -1)), outputs, strict=True):
        output.copy_(row.view(output.shape))


@_collective("gather", read=_root_of)
def _gather(group: Group, root: int, outputs: list[Tensor], input: Tensor) -> None:
    check_parts("gather", outputs, group.size() if group.rank() == root else 0, input)
    group._backend.gather(to_dense(input), outputs, root)


@_collective("scatter", read=_root_of)
def _scatter(group: Group, root: int, output: Tensor, inputs: list[Tensor]) -> None:
    check_parts("scatter", inputs, group.size() if group.rank() == root else 0, output)
    group._backend.scatter(output, list(map(to_dense, inputs)), root)


@_collective("all_to_all", "alltoall", is_one=True)
def _all_to_all_list(group: Group, _: None, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    group._backend.announce("all_to_all", outputs[0])
    group._gloo_backend.alltoall(outputs, list(map(to_dense, inputs))).wait()


@_collective("all_to_all", "alltoall_base all_to_all_single", arguments=4)
def _all_to_all(group: Group, _: None, output: Tensor, input: Tensor, *sizes: list[int]) -> None:
    # Not views of one dimension, which take Gloo longer in inference mode.
    group._backend.announce("all_to_all", output)
    group._gloo_backend.alltoall_base(output, to_dense(input), *sizes).wait()


# ---- registration --------------------------------------------------------------------------------


def make_group(options: Any, backend_options: Any) -> Any:
    """What torch calls to make a group, as it is registered with ``extended_api=True``.

    Returns:
        A :class:`BackendGroup` on one host. On several hosts torch's Gloo, to which torch then
        hands all calls itself, and nothing of this package runs in them.
    """
    rank, timeout = options.group_rank, options.timeout
    # The store brings the ranks together once, for Gloo and for the communicator. Gloo connects
    # with the timeout of its operations, so all ranks are waited for before.
    deadline = Deadline(timeout.total_seconds())
    rendezvous = over_store(options.store, rank, options.group_size, deadline)
    hosts = rendezvous.all_gather(host_identity(), tuple[str, ...])
    gloo_store = dist.PrefixStore("gloo", cast(dist.Store, rendezvous.store))
    gloo = dist.ProcessGroupGloo(gloo_store, rank, options.group_size, timeout)
    return gloo if len(set(hosts)) > 1 else BackendGroup(rendezvous, gloo, timeout, backend_options)


dist.Backend.register_backend("pipekernels", make_group, extended_api=True, devices=["cpu"])
