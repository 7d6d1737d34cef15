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

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.torch_version import TorchVersion

from pipekernels.comm.process_group import derived
from pipekernels.comm.process_group.group import Group, is_dense
from pipekernels.comm.process_group.work import ENDED
from pipekernels.comm.tensors import put_back, to_dense_in_place

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


class _Group(Group):
    """The collectives. The methods have torch's names, old and new."""

    # ---- reductions ------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _options(dist.AllreduceOptions, opts, timeout, reduceOp=op)
        if not is_dense(tensors):
            return self._other(tensors).allreduce(tensors, opts)
        name, factor = _reduction(opts)
        if len(tensors) == 1 and factor is None and self._is_idle(opts):
            # One native call, if it can do everything.
            flat = tensors[0].detach()
            if flat.dim() != 1 and flat.is_contiguous():
                flat = flat.view(-1)
            if flat.dim() == 1 and self._comm._all_reduce_tensor(flat, name, "auto", "rank"):
                return ENDED

        def all_reduce(flat: Tensor) -> None:
            if factor is not None:
                flat *= factor
            derived.all_reduce(self._comm, flat, name)

        def body() -> None:
            for tensor in tensors:
                _in_place(tensor, all_reduce)

        return self._run(opts, body, tensors)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: Any = None,
        op: Any = None,
    ) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _options(dist.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        if not is_dense(tensors):
            return self._other(tensors).reduce(tensors, opts)
        name, factor = _reduction(opts)

        def reduce(flat: Tensor) -> None:
            scaled = flat if factor is None else flat * factor
            derived.reduce(self._comm, scaled, name, opts.rootRank)
            if scaled is not flat and self.rank() == opts.rootRank:
                flat.copy_(scaled)

        def body() -> None:
            for tensor in tensors:
                _in_place(tensor, reduce)

        return self._run(opts, body, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = _options(dist.AllreduceCoalescedOptions, opts)
        if not is_dense(tensors):
            return self._other(tensors).allreduce_coalesced(tensors, opts)
        return self.allreduce(tensors, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(dist.ReduceScatterOptions, opts, timeout, reduceOp=op)
        if not is_dense(outputs):
            return self._other(outputs).reduce_scatter(outputs, inputs, opts)
        for slices in inputs:
            self._check_list("reduce_scatter", slices)

        def body() -> None:
            for output, slices in zip(outputs, inputs, strict=True):
                if all(part.shape == slices[0].shape for part in slices):
                    self._reduce_scatter(output, torch.stack(slices), opts)
                else:
                    self._reduce_scatter_uneven(output, slices, opts)

        return self._run(opts, body, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(dist.ReduceScatterOptions, opts)
        if not is_dense(outputs):
            other = self._other(outputs)
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        for output, input in zip(outputs, inputs, strict=True):
            self._check_sizes("reduce_scatter", output, input, "input")

        def body() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, input, opts)

        return self._run(opts, body, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if not output.is_cpu:
            opts = _options(dist.ReduceScatterOptions, opts)
            return self._other([output])._reduce_scatter_base(output, input, opts)
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

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

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(AllgatherOptions, opts, timeout)
        if not is_dense(inputs):
            return self._other(inputs).allgather(outputs, inputs, opts)
        for tensors in outputs:
            self._check_list("all_gather", tensors)

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
        if not is_dense(inputs):
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
        if not is_dense(tensors):
            return self._other(tensors).broadcast(tensors, opts)

        def body() -> None:
            for tensor in tensors:
                _in_place(tensor, lambda flat: self._comm.broadcast(flat, opts.rootRank))

        return self._run(opts, body, tensors)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = _options(dist.GatherOptions, opts, timeout, rootRank=root)
        if not is_dense(inputs):
            return self._other(inputs).gather(outputs, inputs, opts)
        is_root = self.rank() == opts.rootRank
        for tensors in outputs if is_root else ():
            self._check_list("gather", tensors)

        def body() -> None:
            for i, input in enumerate(inputs):
                derived.gather(self._comm, input.reshape(-1), outputs[i] if is_root else ())

        return self._run(opts, body, [tensor for tensors in outputs for tensor in tensors])

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = _options(dist.ScatterOptions, opts, timeout, rootRank=root)
        if not is_dense(outputs):
            return self._other(outputs).scatter(outputs, inputs, opts)
        is_root = self.rank() == opts.rootRank
        for tensors in inputs if is_root else ():
            self._check_list("scatter", tensors)

        def body() -> None:
            for i, output in enumerate(outputs):
                derived.scatter(self._comm, output, inputs[i] if is_root else (), opts.rootRank)

        return self._run(opts, body, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = _options(dist.AllToAllOptions, opts)
        if not is_dense([*outputs, *inputs]):
            return self._other([*outputs, *inputs]).alltoall(outputs, inputs, opts)

        def body() -> None:
            self._comm.barrier()  # Finds ranks that make another call.
            dense = list(map(to_dense_in_place, outputs))
            self._gloo.alltoall(dense, [input.contiguous() for input in inputs], opts).wait()
            for part, output in zip(dense, outputs, strict=True):
                put_back(part, output)

        return self._run(opts, body, outputs)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        opts = _options(dist.AllToAllOptions, opts)
        splits = output_split_sizes, input_split_sizes
        if not is_dense([output, input]):
            return self._other([output, input]).alltoall_base(output, input, *splits, opts)

        def body() -> None:
            self._comm.barrier()
            dense = to_dense_in_place(output)
            self._gloo.alltoall_base(dense, input.contiguous(), *splits, opts).wait()
            put_back(dense, output)

        return self._run(opts, body, [output])

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        opts = _options(dist.BarrierOptions, opts, timeout)
        return self._run(opts, self._comm.barrier, [])


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


def _reduction(opts: Any) -> tuple[str, Any]:
    """The name of the reduction, and the factor of its terms, None without one."""
    op, factor = opts.reduceOp.__getstate__()  # One call; comparing with all of them takes longer.
    return _REDUCTIONS[op], factor


dist.Backend.register_backend("pipekernels", _Group, extended_api=True, devices=["cpu"])
