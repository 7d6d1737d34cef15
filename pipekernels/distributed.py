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
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.torch_version import TorchVersion

from pipekernels.comm.process_group import derived
from pipekernels.comm.process_group.group import Group, is_dense
from pipekernels.comm.process_group.work import ENDED
from pipekernels.comm.tensors import put_back, to_dense_in_place

if TYPE_CHECKING:
    from pipekernels._backend import Communicator as Native

if TorchVersion(torch.__version__) < "2.7":
    raise ImportError(
        f"the backend 'pipekernels' needs torch 2.7 or newer, this is {torch.__version__}; call "
        "the methods of pipekernels.Communicator instead"
    )

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PREMUL_SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}
_UNSCALED = {op: name for op, name in _REDUCTIONS.items() if op != dist.ReduceOp.PREMUL_SUM}


# Calls on one tensor, made by one of the given native calls, which return whether they made it.


def _all_reduce_at_once(native: Native, opts: Any, tensors: Any) -> bool:
    return len(tensors) == 1 and native.all_reduce_flat(tensors[0], _native_reduction(opts))


def _reduce_scatter_at_once(native: Native, opts: Any, output: Tensor, input: Tensor) -> bool:
    return native.reduce_scatter_flat(input, output, _native_reduction(opts))


def _all_gather_at_once(native: Native, opts: Any, output: Tensor, input: Tensor) -> bool:
    return native.all_gather_flat(input, output)


def _broadcast_at_once(native: Native, opts: Any, tensors: Any) -> bool:
    return len(tensors) == 1 and native.broadcast_flat(tensors[0], opts.rootRank)


Steps = Iterator[list[Tensor]]


def _collective(
    options: Any,
    *,
    at_once: Callable[..., bool] | None = None,
    name: str = "",
    arguments: int = 1,
    decisive: slice = slice(1),
    single: bool = False,
) -> Callable[[Callable[..., Steps]], Callable[..., dist.Work]]:
    """Make a method of ``steps(self, opts, *arguments)``, which checks the arguments, yields the
    call's results, and, once all earlier calls have ended, computes them.

    Args:
        options: the class of torch's options.
        at_once: makes the call with ``(flat_calls, opts, *arguments)`` if it can; returns whether
            it has.
        name: of this method in groups for other tensors; that of ``steps`` if it is empty.
        arguments: how many come before the options.
        decisive: the lists of tensors that decide on the group, the same on all ranks.
        single: the arguments are not lists of tensors.
    """

    def make(steps: Callable[..., Steps]) -> Callable[..., dist.Work]:
        def method(self: _Group, *given: Any, **fields: Any) -> dist.Work:
            if at_once is not None and len(given) > arguments:
                calls = self._immediate(given[arguments])
                if calls is not None and at_once(calls, given[arguments], *given[:arguments]):
                    return ENDED
            opts = _options(options, *given[arguments:], **fields)
            given = given[:arguments]
            if single:
                tensors = given[:2]
            else:
                if any(isinstance(each, Tensor) for each in given):
                    given = tuple([e] if isinstance(e, Tensor) or e else [] for e in given)
                tensors = tuple(tensor for each in given[decisive] for tensor in each)
            if not is_dense(tensors):
                other: Callable[..., dist.Work]
                other = getattr(self._other(tensors), name or steps.__name__)
                return other(*given, opts)
            call = steps(self, opts, *given)
            return self._run(opts, functools.partial(next, call, None), next(call))

        return method

    return make


class _Group(Group):
    """The collectives. The methods have torch's names, old and new."""

    # ---- reductions ------------------------------------------------------------------------------

    def _reduce_all(self, opts: Any, tensors: list[Tensor]) -> Steps:
        name, factor = _reduction(opts)
        native = self._native() if factor is None else None
        yield tensors
        for tensor in tensors:
            if native is not None and native.all_reduce_flat(tensor, name):
                continue
            with _flat(tensor) as flat:
                if factor is not None:
                    flat *= factor
                derived.all_reduce(self._comm, flat, name)

    allreduce = _collective(dist.AllreduceOptions, at_once=_all_reduce_at_once, name="allreduce")(
        _reduce_all
    )
    allreduce_coalesced = _collective(
        dist.AllreduceCoalescedOptions, at_once=_all_reduce_at_once, name="allreduce_coalesced"
    )(_reduce_all)

    @_collective(dist.ReduceOptions)
    def reduce(self, opts: Any, tensors: list[Tensor]) -> Steps:
        name, factor = _reduction(opts)
        yield tensors
        for tensor in tensors:
            with _flat(tensor) as flat:
                scaled = flat if factor is None else flat * factor
                derived.reduce(self._comm, scaled, name, opts.rootRank)
                if scaled is not flat and self.rank() == opts.rootRank:
                    flat.copy_(scaled)

    @_collective(dist.ReduceScatterOptions, arguments=2)
    def reduce_scatter(self, opts: Any, outputs: list[Tensor], inputs: list[list[Tensor]]) -> Steps:
        for slices in inputs:
            self._check_list("reduce_scatter", slices)
        yield outputs
        for output, slices in zip(outputs, inputs, strict=True):
            if all(part.shape == slices[0].shape for part in slices):
                self._reduce_scatter(output, torch.stack(slices), opts)
            else:
                self._reduce_scatter_uneven(output, slices, opts)

    def _reduce_scatter_each(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Steps:
        for output, input in zip(outputs, inputs, strict=True):
            self._check_sizes("reduce_scatter", output, input, "input")
        native = self._native()
        yield outputs
        for output, input in zip(outputs, inputs, strict=True):
            if native is None or not _reduce_scatter_at_once(native, opts, output, input):
                self._reduce_scatter(output, input, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _collective(
        dist.ReduceScatterOptions, name="reduce_scatter_tensor_coalesced", arguments=2
    )(_reduce_scatter_each)

    @_collective(
        dist.ReduceScatterOptions, at_once=_reduce_scatter_at_once, arguments=2, single=True
    )
    def _reduce_scatter_base(self, opts: Any, output: Tensor, input: Tensor) -> Steps:
        return self._reduce_scatter_each(opts, [output], [input])

    reduce_scatter_single = _reduce_scatter_base

    def _reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> None:
        op, factor = _reduction(opts)
        rows = input.reshape(self.size(), -1)
        rows = rows if factor is None else rows * factor
        in_place = output.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        if output.is_contiguous() and not in_place:
            derived.reduce_scatter(self._comm, rows, op, output.view(1, -1))
        else:
            output.copy_(derived.reduce_scatter(self._comm, rows, op).view(output.shape))

    def _reduce_scatter_uneven(self, output: Tensor, slices: list[Tensor], opts: Any) -> None:
        op, factor = _reduction(opts)
        whole = torch.cat([part.reshape(-1) for part in slices])
        whole = whole if factor is None else whole * factor
        derived.all_reduce(self._comm, whole, op)
        own = whole.split([part.numel() for part in slices])[self.rank()]
        output.copy_(own.view(output.shape))

    def _check_list(self, call: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{call} needs a list of {self.size()} tensors, one for each rank of the group, "
                f"got {len(tensors)}"
            )

    def _check_sizes(self, call: str, part: Tensor, whole: Tensor, name: str) -> None:
        if whole.numel() != self.size() * part.numel():
            raise ValueError(
                f"{call} over {self.size()} ranks needs an {name} of {self.size()} x "
                f"{part.numel()} elements, got one of shape {tuple(whole.shape)} beside "
                f"{tuple(part.shape)}"
            )

    # ---- copies ----------------------------------------------------------------------------------

    @_collective(AllgatherOptions, arguments=2, decisive=slice(1, 2))
    def allgather(self, opts: Any, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Steps:
        for tensors in outputs:
            self._check_list("all_gather", tensors)
        yield [tensor for tensors in outputs for tensor in tensors]
        for tensors, input in zip(outputs, inputs, strict=True):
            derived.gather(self._comm, input.reshape(-1), tensors)

    def _all_gather_each(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Steps:
        for output, input in zip(outputs, inputs, strict=True):
            self._check_sizes("all_gather", input, output, "output")
        native = self._native()
        yield outputs
        for output, input in zip(outputs, inputs, strict=True):
            if native is not None and native.all_gather_flat(input, output):
                continue
            row = input.reshape(-1)
            if output.is_contiguous():
                self._comm.all_gather(row, out=output.view(-1))
            else:
                output.copy_(self._comm.all_gather(row).view(output.shape))

    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective(
        AllgatherOptions,
        name="allgather_into_tensor_coalesced",
        arguments=2,
        decisive=slice(1, 2),
    )(_all_gather_each)

    @_collective(AllgatherOptions, at_once=_all_gather_at_once, arguments=2, single=True)
    def _allgather_base(self, opts: Any, output: Tensor, input: Tensor) -> Steps:
        return self._all_gather_each(opts, [output], [input])

    all_gather_single = _allgather_base

    @_collective(dist.BroadcastOptions, at_once=_broadcast_at_once)
    def broadcast(self, opts: Any, tensors: list[Tensor]) -> Steps:
        native = self._native()
        yield tensors
        for tensor in tensors:
            if native is None or not native.broadcast_flat(tensor, opts.rootRank):
                with _flat(tensor) as flat:
                    self._comm.broadcast(flat, opts.rootRank)

    @_collective(dist.GatherOptions, arguments=2, decisive=slice(1, 2))
    def gather(self, opts: Any, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Steps:
        outputs = outputs if self.rank() == opts.rootRank else []
        for tensors in outputs:
            self._check_list("gather", tensors)
        yield [tensor for tensors in outputs for tensor in tensors]
        for i, input in enumerate(inputs):
            derived.gather(self._comm, input.reshape(-1), outputs[i] if outputs else ())

    @_collective(dist.ScatterOptions, arguments=2)
    def scatter(self, opts: Any, outputs: list[Tensor], inputs: list[list[Tensor]]) -> Steps:
        inputs = inputs if self.rank() == opts.rootRank else []
        for tensors in inputs:
            self._check_list("scatter", tensors)
        yield outputs
        for i, output in enumerate(outputs):
            derived.scatter(self._comm, output, inputs[i] if inputs else (), opts.rootRank)

    @_collective(dist.AllToAllOptions, arguments=2, decisive=slice(2))
    def alltoall(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Steps:
        yield outputs
        self._comm.barrier()  # Finds ranks that make another call.
        dense = list(map(to_dense_in_place, outputs))
        self._gloo.alltoall(dense, [input.contiguous() for input in inputs], opts).wait()
        for part, output in zip(dense, outputs, strict=True):
            put_back(part, output)

    @_collective(dist.AllToAllOptions, arguments=4, single=True)
    def alltoall_base(
        self, opts: Any, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any
    ) -> Steps:
        yield [output]
        self._comm.barrier()
        dense = to_dense_in_place(output)
        source = input.contiguous()
        self._gloo.alltoall_base(dense, source, output_sizes, input_sizes, opts).wait()
        put_back(dense, output)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        return self._run(_options(dist.BarrierOptions, opts, timeout), self._comm.barrier, [])


def _options(
    kind: Any, opts: Any = None, timeout: Any = None, *, root: Any = None, op: Any = None
) -> Any:
    """The options of a call: ``opts``, or new ones if that is none, or a root or reduction."""
    if hasattr(opts, "timeout"):
        return opts
    options = kind()
    if isinstance(opts, int):
        root = opts
    elif opts is not None:
        op = opts
    for name, value in (("rootRank", root), ("reduceOp", op), ("timeout", timeout)):
        if value is not None:
            setattr(options, name, value)
    return options


@contextlib.contextmanager
def _flat(tensor: Tensor) -> Iterator[Tensor]:
    """``tensor`` as one dimension, to be changed in place: torch's backends require equally many
    elements on all ranks, a communicator equal shapes."""
    dense = to_dense_in_place(tensor)
    yield dense.view(-1)
    put_back(dense, tensor)


def _native_reduction(opts: Any) -> str:
    """The name of the reduction; empty if its terms have a factor."""
    return _UNSCALED.get(opts.reduceOp.op, "")


def _reduction(opts: Any) -> tuple[str, Any]:
    """The name of the reduction, and the factor of its terms, None without one."""
    op, factor = opts.reduceOp.__getstate__()  # One call; comparing with all of them takes longer.
    return _REDUCTIONS[op], factor


dist.Backend.register_backend("pipekernels", _Group, extended_api=True, devices=["cpu"])
