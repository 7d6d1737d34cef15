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

# Torch's C++ calls the methods with lists and options. Its Python code and users may also pass
# single tensors, and fields of the options instead of options.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.torch_version import TorchVersion

from pipekernels._torch_private import disable_dynamo
from pipekernels.comm.process_group import derived
from pipekernels.comm.process_group.arguments import (
    check_list,
    check_parts,
    check_sizes,
    listed,
    native_reduction,
    options_of,
    reduction_of,
    renewed,
)
from pipekernels.comm.process_group.group import Group, is_dense
from pipekernels.comm.process_group.work import ENDED
from pipekernels.comm.tensors import put_back, to_dense, to_dense_in_place

if TYPE_CHECKING:
    from pipekernels._backend import Communicator as Native

if TorchVersion(torch.__version__) < "2.7":
    raise ImportError(
        f"the backend 'pipekernels' needs torch 2.7 or newer, this is {torch.__version__}; call "
        "the methods of pipekernels.Communicator instead"
    )

# Calls on one tensor, made by one of the given native calls, which return whether they made it.


def _all_reduce_at_once(native: Native, opts: Any, tensors: Any) -> bool:
    return len(tensors) == 1 and native.all_reduce_flat(tensors[0], native_reduction(opts))


def _reduce_scatter_at_once(native: Native, opts: Any, output: Tensor, input: Tensor) -> bool:
    return native.reduce_scatter_flat(input, output, native_reduction(opts))


def _all_gather_at_once(native: Native, opts: Any, output: Tensor, input: Tensor) -> bool:
    return native.all_gather_flat(input, output)


def _broadcast_at_once(native: Native, opts: Any, tensors: Any) -> bool:
    return len(tensors) == 1 and native.broadcast_flat(tensors[0], opts.rootRank)


Plan = tuple[list[Tensor], Callable[[], object]]
"""The tensors that a call fills, and what fills them."""


def _collective(
    options: Any,
    *,
    at_once: Callable[..., bool] | None = None,
    name: str,
    other_name: str = "",
    arguments: int = 1,
    decisive: slice = slice(1),
    single: bool = False,
) -> Callable[[Callable[..., Plan]], Callable[..., dist.Work]]:
    """Make a method of ``plan(self, opts, *arguments)``, which reads and checks the arguments at
    the call. What it returns runs once all earlier calls have ended.

    Args:
        options: the class of torch's options.
        at_once: makes the call with ``(flat_calls, opts, *arguments)`` if it can; returns whether
            it has.
        name: of the collective, for the profiler.
        other_name: of this method in groups for other tensors; that of ``plan`` if it is empty.
        arguments: how many come before the options.
        decisive: the lists of tensors that decide on the group, the same on all ranks.
        single: the arguments are not lists of tensors.
    """

    def make(plan: Callable[..., Plan]) -> Callable[..., dist.Work]:
        @disable_dynamo
        def method(self: _Group, *given: Any, **fields: Any) -> dist.Work:
            if at_once is not None and len(given) > arguments:
                calls = self._immediate(given[arguments])
                if calls is not None and at_once(calls, given[arguments], *given[:arguments]):
                    return ENDED
            opts = options_of(options, *given[arguments:], **fields)
            given = given[:arguments]
            if single:
                tensors = given[:2]
            else:
                given = listed(given)
                tensors = tuple(tensor for each in given[decisive] for tensor in each)
            if not is_dense(tensors):
                other: Callable[..., dist.Work]
                other = getattr(self._other(tensors), other_name or plan.__name__)
                return other(*given, opts)
            results, body = plan(self, opts, *given)
            return self._run(opts, body, results, name)

        return method

    return make


class _Group(Group):
    """The collectives. The methods have torch's names, old and new."""

    # ---- reductions ------------------------------------------------------------------------------

    def _reduce_all(self, opts: Any, tensors: list[Tensor]) -> Plan:
        op, factor = reduction_of(opts)
        native = self._flat_calls if factor is None else None

        def run() -> None:
            for tensor in tensors:
                if native is not None and native.all_reduce_flat(tensor, op):
                    continue
                with _flat(tensor) as flat:
                    if factor is not None:
                        flat *= factor
                    derived.all_reduce(self._comm, flat, op)

        return tensors, run

    allreduce = _collective(
        dist.AllreduceOptions,
        at_once=_all_reduce_at_once,
        name="all_reduce",
        other_name="allreduce",
    )(_reduce_all)
    allreduce_coalesced = _collective(
        dist.AllreduceCoalescedOptions,
        at_once=_all_reduce_at_once,
        name="all_reduce",
        other_name="allreduce_coalesced",
    )(_reduce_all)

    @_collective(dist.ReduceOptions, name="reduce")
    def reduce(self, opts: Any, tensors: list[Tensor]) -> Plan:
        (op, factor), root = reduction_of(opts), opts.rootRank

        def run() -> None:
            for tensor in tensors:
                with _flat(tensor) as flat:
                    scaled = flat if factor is None else flat * factor
                    derived.reduce(self._comm, scaled, op, root)
                    if scaled is not flat and self.rank() == root:
                        flat.copy_(scaled)

        return tensors, run

    @_collective(dist.ReduceScatterOptions, name="reduce_scatter", arguments=2)
    def reduce_scatter(self, opts: Any, outputs: list[Tensor], inputs: list[list[Tensor]]) -> Plan:
        for slices in inputs:
            check_list("reduce_scatter", slices, self.size())
        reduction = reduction_of(opts)

        def run() -> None:
            for output, slices in zip(outputs, inputs, strict=True):
                if all(part.shape == slices[0].shape for part in slices):
                    self._reduce_scatter(output, torch.stack(slices), *reduction)
                else:
                    self._reduce_scatter_uneven(output, slices, *reduction)

        return outputs, run

    def _reduce_scatter_each(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Plan:
        for output, input in zip(outputs, inputs, strict=True):
            check_sizes("reduce_scatter", output, input, "input", self.size())
        op, factor = reduction_of(opts)
        native = self._flat_calls if factor is None else None

        def run() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                if native is None or not native.reduce_scatter_flat(input, output, op):
                    self._reduce_scatter(output, input, op, factor)

        return outputs, run

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _collective(
        dist.ReduceScatterOptions,
        name="reduce_scatter",
        other_name="reduce_scatter_tensor_coalesced",
        arguments=2,
    )(_reduce_scatter_each)

    @_collective(
        dist.ReduceScatterOptions,
        at_once=_reduce_scatter_at_once,
        name="reduce_scatter",
        arguments=2,
        single=True,
    )
    def _reduce_scatter_base(self, opts: Any, output: Tensor, input: Tensor) -> Plan:
        return self._reduce_scatter_each(opts, [output], [input])

    reduce_scatter_single = _reduce_scatter_base

    def _reduce_scatter(self, output: Tensor, input: Tensor, op: str, factor: Any) -> None:
        terms = to_dense(input)
        if factor is not None:
            terms = terms * factor
        elif output.untyped_storage().data_ptr() == terms.untyped_storage().data_ptr():
            terms = terms.clone()
        with _flat(output) as flat:
            derived.reduce_scatter(self._comm, terms.view(-1), op, flat)

    def _reduce_scatter_uneven(
        self, output: Tensor, slices: list[Tensor], op: str, factor: Any
    ) -> None:
        whole = torch.cat([part.reshape(-1) for part in slices])
        whole = whole if factor is None else whole * factor
        self._comm._cpu_backend.announce("reduce_scatter", whole, op)
        derived.all_reduce(self._comm, whole, op)
        own = whole.split([part.numel() for part in slices])[self.rank()]
        output.copy_(own.view(output.shape))

    # ---- copies ----------------------------------------------------------------------------------

    @_collective(AllgatherOptions, name="all_gather", arguments=2, decisive=slice(1, 2))
    def allgather(self, opts: Any, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Plan:
        for tensors in outputs:
            check_list("all_gather", tensors, self.size())

        def run() -> None:
            for tensors, input in zip(outputs, inputs, strict=True):
                rows = self._comm.all_gather(input.reshape(1, -1))
                for row, output in zip(rows, tensors, strict=True):
                    output.copy_(row.view(output.shape))

        return [tensor for tensors in outputs for tensor in tensors], run

    def _all_gather_each(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Plan:
        for output, input in zip(outputs, inputs, strict=True):
            check_sizes("all_gather", input, output, "output", self.size())

        native = self._flat_calls

        def run() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                if native is not None and native.all_gather_flat(input, output):
                    continue
                with _flat(output) as flat:
                    self._comm.all_gather(input.reshape(-1), out=flat)

        return outputs, run

    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective(
        AllgatherOptions,
        name="all_gather",
        other_name="allgather_into_tensor_coalesced",
        arguments=2,
        decisive=slice(1, 2),
    )(_all_gather_each)

    @_collective(
        AllgatherOptions, at_once=_all_gather_at_once, name="all_gather", arguments=2, single=True
    )
    def _allgather_base(self, opts: Any, output: Tensor, input: Tensor) -> Plan:
        return self._all_gather_each(opts, [output], [input])

    all_gather_single = _allgather_base

    @_collective(dist.BroadcastOptions, at_once=_broadcast_at_once, name="broadcast")
    def broadcast(self, opts: Any, tensors: list[Tensor]) -> Plan:
        root, native = opts.rootRank, self._flat_calls

        def run() -> None:
            for tensor in tensors:
                if native is not None and native.broadcast_flat(tensor, root):
                    continue
                with _flat(tensor) as flat:
                    self._comm.broadcast(flat, root)

        return tensors, run

    @_collective(dist.GatherOptions, name="gather", arguments=2, decisive=slice(1, 2))
    def gather(self, opts: Any, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Plan:
        root = opts.rootRank
        if self.rank() == root:
            for tensors, input in zip(outputs, inputs, strict=True):
                check_parts("gather", tensors, input, self.size())
        else:
            outputs = [[] for _ in inputs]

        def run() -> None:
            for tensors, input in zip(outputs, inputs, strict=True):
                with contextlib.ExitStack() as stack:
                    flat = [stack.enter_context(_flat(output)) for output in tensors]
                    derived.gather(self._comm, self._gloo, to_dense(input).view(-1), flat, root)

        return [tensor for tensors in outputs for tensor in tensors], run

    @_collective(dist.ScatterOptions, name="scatter", arguments=2)
    def scatter(self, opts: Any, outputs: list[Tensor], inputs: list[list[Tensor]]) -> Plan:
        root = opts.rootRank
        if self.rank() == root:
            for output, tensors in zip(outputs, inputs, strict=True):
                check_parts("scatter", tensors, output, self.size())
        else:
            inputs = [[] for _ in outputs]

        def run() -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                with _flat(output) as flat:
                    parts = [to_dense(each).view(-1) for each in tensors]
                    derived.scatter(self._comm, self._gloo, flat, parts, root)

        return outputs, run

    @_collective(dist.AllToAllOptions, name="all_to_all", arguments=2, decisive=slice(2))
    def alltoall(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Plan:
        opts = renewed(dist.AllToAllOptions, opts)

        def run() -> None:
            self._comm._cpu_backend.announce("all_to_all", outputs[0])
            dense = list(map(to_dense_in_place, outputs))
            self._gloo.alltoall(dense, list(map(to_dense, inputs)), opts).wait()
            for part, output in zip(dense, outputs, strict=True):
                put_back(part, output)

        return outputs, run

    @_collective(dist.AllToAllOptions, name="all_to_all", arguments=4, single=True)
    def alltoall_base(
        self, opts: Any, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any
    ) -> Plan:
        opts = renewed(dist.AllToAllOptions, opts)
        sizes = list(output_sizes), list(input_sizes)

        def run() -> None:
            self._comm._cpu_backend.announce("all_to_all", output)
            dense = to_dense_in_place(output)
            self._gloo.alltoall_base(dense, to_dense(input), *sizes, opts).wait()
            put_back(dense, output)

        return [output], run

    all_to_all_single = alltoall_base

    @disable_dynamo
    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        opts = options_of(dist.BarrierOptions, opts, timeout)
        return self._run(opts, self._comm.barrier, [], "barrier")


@contextlib.contextmanager
def _flat(tensor: Tensor) -> Iterator[Tensor]:
    """``tensor`` as one dimension, to be changed in place: torch's backends require equally many
    elements on all ranks, a communicator equal shapes."""
    dense = to_dense_in_place(tensor)
    yield dense.view(-1)
    put_back(dense, tensor)


dist.Backend.register_backend("pipekernels", _Group, extended_api=True, devices=["cpu"])
