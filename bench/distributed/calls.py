"""Calls of torch.distributed on two CPU ranks: the backend pipekernels, Gloo, and torch alone.

All candidates make the same calls of ``torch.distributed``, in a loop without a common start, so
that no rank spins while a helper thread of a peer works.

* ``nothing``: a Python group in one process, as ours is one, whose calls return at once: what torch
  itself takes.
* ``direct``: the method of :class:`pipekernels.Communicator` instead; synchronous calls only.
* ``vLLM``: its kernels, called directly, which exist for AVX-512 and Arm only.

``send and back`` is two messages, the second after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import Options, Turns
from bench.processes import VLLM, Serve, join, repeated, started

RANKS = 2
CALLS = 300  # Per turn, and as many before that do not count: woken ranks may begin on one core.
SYNCHRONOUS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
OTHERS = ("async all_reduce", "functional all_reduce", "DTensor sum", "coalesced all_reduce")
MESSAGES = ("send and back", "all_to_all_single")
SIZES = {"1 KiB": 1 << 10, "4 KiB": 1 << 12, "64 KiB": 1 << 16, "4 MiB": 1 << 22}
ALL = ("nothing", "direct", "vLLM", "pipekernels", "Gloo")
BY = {  # The calls of those that do not make all.
    "nothing": (*SYNCHRONOUS, *OTHERS),
    "direct": (*SYNCHRONOUS, "send and back"),
    "vLLM": ("all_reduce", "all_gather_into_tensor", "send and back"),
}
CANDIDATES = {
    f"{call}, {size}": tuple(
        name for name in ALL if call in BY.get(name, (*SYNCHRONOUS, *OTHERS, *MESSAGES))
    )
    for call in (*SYNCHRONOUS, *OTHERS, *MESSAGES)
    for size in list(SIZES)[: 4 if call in MESSAGES else 3]
}
QUICK = {"all_reduce, 1 KiB": ALL}
BASE = "Gloo"
CONDITIONS = {
    "tensors": "float32, the size that of a rank's part; two of them in coalesced calls",
    "ranks": f"{RANKS} processes of one thread, free to run on any core",
    "timing": f"{CALLS} calls in a row, slowest rank, candidates in turn; as many before "
    "that do not count; medians over turns",
}


def call_of(case: str, ranks: int) -> tuple[Callable[[], object], torch.Tensor, float]:
    """What a case calls, a tensor that one call changes, and the value that it then has.

    All ranks start with ones.
    """
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    name, size = case.split(", ")
    part = torch.ones(SIZES[size] // 4)
    whole, group = torch.ones(ranks * part.numel()), dist.group.WORLD
    total = torch.zeros(part.numel())

    assert group is not None

    def coalesced() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(part)
            dist.all_reduce(total)

    def functional_sum() -> None:
        total.copy_(functional.all_reduce(part, "sum", group))

    mesh = init_device_mesh("cpu", (ranks,)) if name == "DTensor sum" else None

    def dtensor_sum() -> None:
        partial = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        total.copy_(partial.redistribute(placements=[Replicate()]).to_local())

    calls: dict[str, tuple[Callable[[], object], torch.Tensor, float]] = {
        "all_reduce": (lambda: dist.all_reduce(part), part, ranks),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(whole, part), whole, 1),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(total, whole), total, ranks),
        "broadcast": (lambda: dist.broadcast(part, 0), part, 1),
        "async all_reduce": (lambda: dist.all_reduce(part, async_op=True).wait(), part, ranks),
        "functional all_reduce": (functional_sum, total, ranks),
        "DTensor sum": (dtensor_sum, total, ranks),
        "coalesced all_reduce": (coalesced, part, ranks),
        "send and back": (send_and_back(dist.send, dist.recv, part, total), total, 1),
        "all_to_all_single": (lambda: dist.all_to_all_single(total, part), total, 1),
    }
    return calls[name]


def send_and_back(
    send: Callable[..., object], recv: Callable[..., object], *tensors: torch.Tensor
) -> Callable[[], object]:
    """Two messages, of the first of ``tensors`` and to the second."""
    peer = 1 - torch.distributed.get_rank()
    calls = [lambda: send(tensors[0], peer), lambda: recv(tensors[1], peer)]
    first, second = calls if peer == 1 else calls[::-1]
    return lambda: (first(), second())


def _nothing(rank: int, port: int, serve: Serve, case: str) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pipekernels.distributed.group import ENDED

    class Nothing(dist.ProcessGroup):
        @property
        def group_name(self) -> Any:  # torch's own is that of a backend in C++.
            return dist.distributed_c10d._world.pg_names[self]

    for method in ("allreduce", "allreduce_coalesced", "_allgather_base", "_reduce_scatter_base",
                   "all_gather_single", "reduce_scatter_single", "broadcast"):  # fmt: skip
        setattr(Nothing, method, lambda *_: ENDED)
    made: Any = Nothing

    torch.set_num_threads(1)
    dist.Backend.register_backend("nothing", lambda *_: made(0, RANKS), extended_api=True)
    dist.init_process_group("nothing", rank=0, world_size=RANKS, store=FakeStore())
    call, _, _ = call_of(case, RANKS)
    serve(repeated(call, CALLS, CALLS))


def _backend(rank: int, port: int, serve: Serve, case: str, backend: str) -> None:
    join(backend, rank, RANKS, port)
    call, changed, value = call_of(case, RANKS)
    call()
    assert changed.eq(value).all(), f"{case} on {backend}: {changed}"
    serve(repeated(call, CALLS, CALLS))


def _direct(rank: int, port: int, serve: Serve, case: str) -> None:
    from pipekernels import Communicator

    join("gloo", rank, RANKS, port)
    name, size = case.split(", ")
    part = torch.ones(SIZES[size] // 4)
    whole = torch.ones(RANKS * part.numel())
    with Communicator.from_process_group() as comm:
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.all_reduce(part),
            "all_gather_into_tensor": lambda: comm.all_gather(part, out=whole),
            "reduce_scatter_tensor": lambda: comm.reduce_scatter(whole, out=part),
            "broadcast": lambda: comm.broadcast(part, 0),
            "send and back": send_and_back(comm.send, comm.recv, part, whole[: len(part)]),
        }
        serve(repeated(calls[name], CALLS, CALLS))


def _vllm(rank: int, port: int, serve: Serve, case: str) -> None:
    import torch.distributed as dist

    join("gloo", rank, RANKS, port)
    torch.ops.load_library(VLLM)
    kernels, name = torch.ops.vllm_shm, f"vllm-{port}"
    ranks = kernels.init_shm_manager(name, RANKS, rank, 1)
    dist.barrier()
    kernels.join_shm_manager(ranks, name)
    dist.barrier()
    Path(f"/dev/shm/{name}_{rank}").unlink()
    call, size = case.split(", ")
    part = torch.ones(SIZES[size] // 4)
    whole = torch.ones(RANKS * part.numel())
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: kernels.shm_allreduce(ranks, part),
        "all_gather_into_tensor": lambda: kernels.shm_all_gather(ranks, part, whole),
        "send and back": send_and_back(
            lambda tensor, peer: kernels.shm_send_tensor_list(ranks, [tensor], peer),
            lambda _, peer: kernels.shm_recv_tensor_list(ranks, peer),
            *(part, part),
        ),
    }
    serve(repeated(calls[call], CALLS, CALLS))


WORKERS = {
    "nothing": (1, _nothing),
    "direct": (RANKS, _direct),
    "vLLM": (RANKS, _vllm),
    "pipekernels": (RANKS, _backend, "pipekernels"),
    "Gloo": (RANKS, _backend, "gloo"),
}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every candidate."""
    return Turns(started(WORKERS, names, case), 1, 2 if options.quick else 20)
