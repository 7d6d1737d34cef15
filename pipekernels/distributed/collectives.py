"""The collectives of the backend, one class each; ``COLLECTIVES`` lists them.

Torch's backends require equally many elements on all ranks, a communicator equal shapes: so it gets
tensors of one dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels.comm.tensors import check_dense, parts_of, to_dense, to_dense_in_place
from pipekernels.distributed import derived
from pipekernels.distributed.group import Group

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


class Collective:
    """A collective, and one call of it, whose options are read when the call is made.

    A call has parts, several if it is of several results. The arguments of a part are its result,
    a tensor or a list of tensors, and its inputs.

    Attributes:
        name: for the profiler, and for errors.
        methods: the methods of a process group that make the call, by their old and new names.
        arguments: how many arguments of these methods come before the options.
        has_parts: whether each argument is a list with an entry for each part.
        copies: whether :meth:`run` copies to the result, which may be strided then.
    """

    name: ClassVar[str]
    methods: ClassVar[Sequence[str]]
    arguments: ClassVar[int] = 2
    has_parts: ClassVar[bool] = True
    copies: ClassVar[bool] = False

    def __init__(self, group: Group, opts: Any) -> None:
        self.group = group
        self.comm = group._comm
        self.backend = group._backend

    def native(self, waits: bool, *part: Any) -> bool:
        """Make the call for one part in one native call; returns False if there is none for it, or
        if the caller does not wait and the call may take long."""
        return False

    def check(self, *part: Any) -> None:
        """Raise what :meth:`run` would raise for these arguments."""

    def run(self, *part: Any) -> None:
        """Make the call for one part, after all earlier calls have ended. The result is dense."""
        raise NotImplementedError


class Reduction(Collective):
    """A collective whose options name an operation."""

    def __init__(self, group: Group, opts: Any) -> None:
        super().__init__(group, opts)
        op = opts.reduceOp
        self.op = _REDUCTIONS[op.op]
        self.factor = op.__getstate__()[1] if self.op == "premul_sum" else None  # Of the terms.


class AllReduce(Reduction):
    name, methods, arguments = "all_reduce", ("allreduce", "allreduce_coalesced"), 1

    def native(self, waits: bool, tensor: Tensor) -> bool:
        return self.factor is None and self.backend.core.all_reduce_flat(tensor, self.op, waits)

    def check(self, tensor: Tensor) -> None:
        derived.check(tensor, self.op)

    def run(self, tensor: Tensor) -> None:
        derived.all_reduce(self.comm, tensor.view(-1), self.op, self.factor)


class Reduce(Reduction):
    name, methods, arguments = "reduce", ("reduce",), 1

    def __init__(self, group: Group, opts: Any) -> None:
        super().__init__(group, opts)
        self.root = opts.rootRank

    def check(self, tensor: Tensor) -> None:
        derived.check(tensor, self.op)

    def run(self, tensor: Tensor) -> None:
        derived.reduce(self.comm, tensor.view(-1), self.op, self.factor, self.root)


class ReduceScatter(Reduction):
    name = "reduce_scatter"
    methods = (
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        *("_reduce_scatter_base", "reduce_scatter_single"),
    )

    def native(self, waits: bool, output: Tensor, input: Tensor) -> bool:
        if self.factor is not None:
            return False
        return self.backend.core.reduce_scatter_flat(input, output, self.op, waits)

    def check(self, output: Tensor, input: Tensor) -> None:
        check_rows(self.name, self.group.size(), input, output)
        derived.check(output, self.op)

    def run(self, output: Tensor, input: Tensor) -> None:
        flat = to_dense(input).view(-1)
        derived.reduce_scatter(self.comm, output.view(-1), flat, self.op, self.factor)


class ReduceScatterList(Reduction):
    name, methods = "reduce_scatter", ("reduce_scatter",)

    def check(self, output: Tensor, inputs: list[Tensor]) -> None:
        check_parts(self.name, inputs, self.group.size())
        check_parts(self.name, [inputs[self.group.rank()]], 1, output)
        derived.check(output, self.op)

    def run(self, output: Tensor, inputs: list[Tensor]) -> None:
        whole, sizes = torch.cat([x.reshape(-1) for x in inputs]), [x.numel() for x in inputs]
        flat = output.view(-1)
        if len(set(sizes)) == 1:
            return derived.reduce_scatter(self.comm, flat, whole, self.op, self.factor)
        # No native call has slices of different sizes: each rank takes its own slice of the sum.
        self.backend.announce("reduce_scatter", whole, self.op)
        derived.all_reduce(self.comm, whole, self.op, self.factor)
        flat.copy_(whole.split(sizes)[self.group.rank()])


class Rooted(Collective):
    """A collective whose options name a rank."""

    def __init__(self, group: Group, opts: Any) -> None:
        super().__init__(group, opts)
        self.root = opts.rootRank
        self.size_at_root = group.size() if group.rank() == self.root else 0


class Broadcast(Rooted):
    name, methods, arguments = "broadcast", ("broadcast",), 1

    def native(self, waits: bool, tensor: Tensor) -> bool:
        return self.backend.core.broadcast_flat(tensor, self.root, waits)

    def run(self, tensor: Tensor) -> None:
        self.comm.broadcast(tensor.view(-1), self.root)


class Gather(Rooted):
    name, methods = "gather", ("gather",)

    def run(self, outputs: list[Tensor], input: Tensor) -> None:
        check_parts(self.name, outputs, self.size_at_root, input)
        self.backend.gather(to_dense(input), outputs, self.root)


class Scatter(Rooted):
    name, methods = "scatter", ("scatter",)

    def run(self, output: Tensor, inputs: list[Tensor]) -> None:
        check_parts(self.name, inputs, self.size_at_root, output)
        self.backend.scatter(output, [to_dense(each) for each in inputs], self.root)


class AllGather(Collective):
    name = "all_gather"
    methods = (
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        *("_allgather_base", "all_gather_single"),
    )

    def native(self, waits: bool, output: Tensor, input: Tensor) -> bool:
        return self.backend.core.all_gather_flat(input, output, waits)

    def check(self, output: Tensor, input: Tensor) -> None:
        check_rows(self.name, self.group.size(), output, input)

    def run(self, output: Tensor, input: Tensor) -> None:
        self.comm.all_gather(input.reshape(-1), out=output.view(-1))


class AllGatherList(Collective):
    name, methods, copies = "all_gather", ("allgather",), True

    def check(self, outputs: list[Tensor], input: Tensor) -> None:
        check_parts(self.name, outputs, self.group.size(), input)

    def run(self, outputs: list[Tensor], input: Tensor) -> None:
        # Into one tensor, as a communicator gathers; a list of tensors has no common memory.
        for row, output in zip(self.comm.all_gather(input.reshape(1, -1)), outputs, strict=True):
            output.copy_(row.view(output.shape))


class AllToAllList(Collective):
    name, methods, has_parts = "all_to_all", ("alltoall",), False

    def run(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        self.backend.all_to_all(outputs, [to_dense(each) for each in inputs])


class AllToAll(Collective):
    name, methods, arguments = "all_to_all", ("alltoall_base", "all_to_all_single"), 4

    def run(self, output: Tensor, input: Tensor, *sizes: list[int]) -> None:
        parts = [
            parts_of(tensor, given or None, self.group.size())
            for tensor, given in zip((output, to_dense(input)), sizes, strict=True)
        ]
        self.backend.all_to_all(*parts)


COLLECTIVES: tuple[type[Collective], ...] = (
    *(AllReduce, Reduce, ReduceScatter, ReduceScatterList, Broadcast, Gather, Scatter),
    *(AllGather, AllGatherList, AllToAllList, AllToAll),
)


def tensors_in(arguments: Iterable[Tensor | list[Tensor]]) -> list[Tensor]:
    """The tensors among ``arguments``, and in lists there."""
    tensors: list[Tensor] = []
    for argument in arguments:
        tensors += argument if isinstance(argument, list) else (argument,)
    return tensors


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
