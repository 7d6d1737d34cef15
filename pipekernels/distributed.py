"""The ``torch.distributed`` backend ``"pipekernels"``, with faster collectives for CPU tensors.

Where the package is installed, programs name it without an import; where it is not, as in its
source folder, importing this module registers it::

    torch.distributed.init_process_group("pipekernels")

Then ``all_reduce``, ``reduce``, ``reduce_scatter``, ``all_gather``, ``gather``, ``scatter`` and
their variants on one tensor or several, ``broadcast`` and ``barrier`` run on a
:class:`pipekernels.Communicator`, also on several hosts, and in DDP, FSDP, DTensor and functional
collectives; with all of torch's reductions, for every dtype that has them
(``comm/process_group/derived.py`` says how). Gloo runs ``all_to_all``, point-to-point calls, and
whatever has sparse tensors. Torch restricts ``monitored_barrier``, and DDP's built-in C++ hook
``FP16_COMPRESS``, to its own backends; the Python hook of that name works. ``split_group`` wants an
accelerator: use ``new_group``.

Asynchronous calls run one after another on a thread of the group. A lost rank ends the group: its
errors are those of a communicator (:class:`pipekernels.PeerError`, ``TimeoutError``); if torch
waits in C++, as in DDP, they arrive as a ``RuntimeError`` that quotes them.

With ``init_process_group("cpu:pipekernels,cuda:nccl")`` collectives of CUDA tensors run on a second
group, of NCCL, which the first of them makes: all ranks of a group must take part in it. Name
``cpu`` first: otherwise torch makes an NCCL backend that nobody uses, and warns that it was not
destroyed. Point-to-point calls of CUDA tensors need ``new_group(backend="nccl")``:
in other groups torch does not join the calls of ``batch_isend_irecv``, and NCCL's might wait for
each other.

Raises:
    ImportError: torch is older than 2.7, which may lose track of a pending call of such a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from pipekernels._torch_private import disable_dynamo, is_profiler_enabled
from pipekernels.comm.process_group import derived
from pipekernels.comm.process_group.arguments import (
    check_parts,
    check_sizes,
    options_of,
    parts_of,
    reduction_of,
    tensors_in,
)
from pipekernels.comm.process_group.group import Group, is_dense
from pipekernels.comm.process_group.work import DONE, ENDED
from pipekernels.comm.tensors import put_back, to_dense, to_dense_in_place

if TorchVersion(torch.__version__) < "2.7":
    raise ImportError(
        f"the backend 'pipekernels' needs torch 2.7 or newer, this is {torch.__version__}; call "
        "the methods of pipekernels.Communicator instead"
    )


class _Group(Group):
    """A group with its collectives, of which all but one are added below."""

    @disable_dynamo
    def barrier(self, *given: Any, **fields: Any) -> dist.Work:
        return self._run(options_of(*given, **fields), self._comm.barrier, [], "barrier")


def _collective(
    name: str,
    method_names: str = "",
    *,
    arguments: int = 2,
    read: Callable[[Any], Any] | None = None,
    check: Callable[..., None] | None = None,
    native: Any = None,
    decisive: slice = slice(None),
    is_one: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make methods of ``run(group, value, *part)``, which runs once all earlier calls have ended,
    for each part of a call: a tensor or a list of tensors for each argument, the result first.

    Args:
        name: of the collective, for the profiler.
        method_names: torch's, old and new; ``name`` if empty.
        arguments: how many come before the options.
        read: the ``value`` of torch's options; at the call.
        check: raises errors of the same arguments as ``run``, at the call.
        native: with native calls in place of the group: makes one of them if that suffices;
            returns whether it has.
        decisive: the arguments that all ranks give, whose tensors decide on the group.
        is_one: the arguments are those of the only part, and not lists for several.
    """

    def method_of(method_name: str, run: Callable[..., None]) -> Callable[..., dist.Work]:
        @disable_dynamo
        def method(self: _Group, *given: Any, **fields: Any) -> dist.Work:
            calls = None if native is None else self._flat_calls
            if calls is not None and len(given) > arguments:
                opts = given[arguments]
                if (
                    not getattr(opts, "asyncOp", True)
                    and self._last is DONE
                    and not is_profiler_enabled()
                ):  # The caller waits, no earlier call is left, and nobody looks.
                    tensors = given[0] if arguments == 1 else given[:arguments]
                    value = None if read is None else read(opts)
                    if len(tensors) == arguments and native(calls, value, *tensors):
                        return ENDED
            parts = parts_of(given[:arguments], is_one)
            deciding = tensors_in(parts, decisive)
            if not is_dense(deciding):
                work: dist.Work = getattr(self._other(deciding), method_name)(*given, **fields)
                return work
            opts = options_of(*given[arguments:], **fields)
            value = None if read is None else read(opts)
            for part in parts:
                if check is not None:
                    check(self, value, *part)

            def body() -> None:
                for part in parts:
                    if calls is None or not native(calls, value, *part):
                        run(self, value, *part)

            return self._run(opts, body, tensors_in(parts, slice(1)), name)

        return method

    def add(run: Callable[..., None]) -> Callable[..., None]:
        for method_name in (method_names or name).split():
            setattr(_Group, method_name, method_of(method_name, run))
        return run

    return add


@contextlib.contextmanager
def _flat(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """``tensors`` as ones of one dimension, to be changed in place: torch's backends require
    equally many elements on all ranks, a communicator equal shapes."""
    dense = [to_dense_in_place(tensor) for tensor in tensors]
    yield [each.view(-1) for each in dense]
    for each, tensor in zip(dense, tensors, strict=True):
        put_back(each, tensor)


# ---- reductions: the value is the operation and the factor of its terms --------------------------


@_collective(
    "all_reduce",
    "allreduce allreduce_coalesced",
    arguments=1,
    read=reduction_of,
    native=lambda calls, value, x: value[1] is None and calls.all_reduce_flat(x, value[0]),
)
def _all_reduce(group: Group, value: Any, tensor: Tensor) -> None:
    op, factor = value
    with _flat(tensor) as (flat,):
        if factor is not None:
            flat *= factor
        derived.all_reduce(group._comm, flat, op)


@_collective("reduce", arguments=1, read=lambda opts: (*reduction_of(opts), opts.rootRank))
def _reduce(group: Group, value: Any, tensor: Tensor) -> None:
    op, factor, root = value
    with _flat(tensor) as (flat,):
        scaled = flat if factor is None else flat * factor
        derived.reduce(group._comm, scaled, op, root)
        if scaled is not flat and group.rank() == root:
            flat.copy_(scaled)


@_collective(
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced "
    "_reduce_scatter_base reduce_scatter_single",
    read=reduction_of,
    check=lambda group, _, y, x: check_sizes("reduce_scatter", y, x, "input", group.size()),
    native=lambda calls, value, y, x: (
        value[1] is None and calls.reduce_scatter_flat(x, y, value[0])
    ),
)
def _reduce_scatter(group: Group, value: Any, output: Tensor, input: Tensor) -> None:
    op, factor = value
    terms = to_dense(input)
    if factor is not None:
        terms = terms * factor
    elif output.untyped_storage().data_ptr() == terms.untyped_storage().data_ptr():
        terms = terms.clone()
    with _flat(output) as (flat,):
        derived.reduce_scatter(group._comm, terms.view(-1), op, flat)


@_collective(
    "reduce_scatter",
    read=reduction_of,
    check=lambda group, _, y, inputs: check_parts("reduce_scatter", inputs, group.size()),
)
def _reduce_scatter_list(group: Group, value: Any, output: Tensor, inputs: list[Tensor]) -> None:
    whole, sizes = torch.cat([x.reshape(-1) for x in inputs]), [x.numel() for x in inputs]
    if len(set(sizes)) == 1:
        return _reduce_scatter(group, value, output, whole)
    group._comm._cpu_backend.announce("reduce_scatter", whole, value[0])
    _all_reduce(group, value, whole)
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
    with _flat(tensor) as (flat,):
        group._comm.broadcast(flat, root)


@_collective(
    "all_gather",
    "allgather_into_tensor_coalesced all_gather_single_coalesced _allgather_base all_gather_single",
    check=lambda group, _, y, x: check_sizes("all_gather", x, y, "output", group.size()),
    native=lambda calls, _, y, x: calls.all_gather_flat(x, y),
)
def _all_gather(group: Group, _: None, output: Tensor, input: Tensor) -> None:
    with _flat(output) as (flat,):
        group._comm.all_gather(input.reshape(-1), out=flat)


@_collective(
    "all_gather",
    "allgather",
    check=lambda group, _, outputs, x: check_parts("all_gather", outputs, group.size(), x),
)
def _all_gather_list(group: Group, _: None, outputs: list[Tensor], input: Tensor) -> None:
    for row, output in zip(group._comm.all_gather(input.reshape(1, -1)), outputs, strict=True):
        output.copy_(row.view(output.shape))


def _parts_at(root: int, group: Group) -> int:
    """How many tensors this rank gives a call that only the root gives a list."""
    return group.size() if group.rank() == root else 0


@_collective(
    "gather",
    read=_root_of,
    check=lambda group, root, y, x: check_parts("gather", y, _parts_at(root, group), x),
    decisive=slice(1, 2),
)
def _gather(group: Group, root: int, outputs: list[Tensor], input: Tensor) -> None:
    with _flat(*outputs) as flat:
        derived.gather(group._comm, group._gloo, to_dense(input).view(-1), flat, root)


@_collective(
    "scatter",
    read=_root_of,
    check=lambda group, root, y, x: check_parts("scatter", x, _parts_at(root, group), y),
    decisive=slice(1),
)
def _scatter(group: Group, root: int, output: Tensor, inputs: list[Tensor]) -> None:
    with _flat(output) as (flat,):
        parts = [to_dense(each).view(-1) for each in inputs]
        derived.scatter(group._comm, group._gloo, flat, parts, root)


@_collective("all_to_all", "alltoall", is_one=True)
def _all_to_all_list(group: Group, _: None, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    group._comm._cpu_backend.announce("all_to_all", outputs[0])
    dense = list(map(to_dense_in_place, outputs))
    group._gloo.alltoall(dense, list(map(to_dense, inputs))).wait()
    for part, output in zip(dense, outputs, strict=True):
        put_back(part, output)


@_collective("all_to_all", "alltoall_base all_to_all_single", arguments=4, decisive=slice(2))
def _all_to_all(group: Group, _: None, output: Tensor, input: Tensor, *sizes: list[int]) -> None:
    group._comm._cpu_backend.announce("all_to_all", output)
    dense = to_dense_in_place(output)  # Not a view, which takes Gloo longer in inference mode.
    group._gloo.alltoall_base(dense, to_dense(input), *sizes).wait()
    put_back(dense, output)


dist.Backend.register_backend("pipekernels", _Group, extended_api=True, devices=["cpu"])
