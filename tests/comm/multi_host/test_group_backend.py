"""CUDA tensors over several hosts: the backend over a process group, here Gloo, on CPU tensors."""

import pytest
import torch
import torch.distributed as dist
from support import reference
from support.ranks import in_group

from pipekernels import Communicator, _backend
from pipekernels.comm.multi_host import cuda

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


@in_group(3, hosts="aab")
def test_collectives(rank: int) -> None:
    """The backend's collectives, and where a communicator takes it from."""
    size = dist.get_world_size()
    _backend.require_cuda = lambda device=None: None
    cuda.backends_of = lambda group: {"cpu": "gloo", "cuda": "gloo"}
    group = dist.new_group(backend="gloo")
    backend = cuda.GroupBackend(group, torch.device("cuda", 0))
    backend.device = CPU
    x = torch.arange(4.0) + rank
    for op in ("sum", "avg", "max", "min"):
        expected = reference.all_reduce([torch.arange(4.0) + each for each in range(3)], op)
        y = x.clone()
        backend.all_reduce(y, op, "auto")
        assert y.equal(expected)
        rows, out = x.repeat(size, 1), torch.empty(1, 4)
        backend.reduce_scatter(rows, out, op)
        assert out[0].equal(expected)
    counts = torch.full((2, 2), rank, dtype=torch.int64)
    backend.all_reduce(counts, "sum in tree order", "auto")  # Integers have no order.
    assert counts.eq(3).all()
    with pytest.raises(ValueError, match="order='tree' is for communicators on one host"):
        backend.all_reduce(x, "sum in tree order", "auto")
    flags = torch.tensor([rank == 1, True])
    gathered = backend.empty(torch.Size((size, 2)), torch.bool)
    backend.all_gather(flags, gathered)
    assert gathered.tolist() == [[False, True], [True, True], [False, True]]
    backend.broadcast(flags, 1)
    assert flags.all()
    backend.check(), backend.close(abort=False)
    with Communicator.from_process_group(group) as comm:
        assert type(comm._device_backend(torch.device("cuda", 0))) is cuda.GroupBackend
        assert comm._device_backend(torch.device("cuda", 0))._group is group
        with pytest.raises(ValueError, match="is on cuda:0, but the tensor on cuda:1"):
            comm._device_backend(torch.device("cuda", 1))
        half = comm.split(0)
        with pytest.raises(RuntimeError, match="there is no group; make the communicator by"):
            half._device_backend(torch.device("cuda", 0))


def test_groups_without_a_backend_for_cuda_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "require_cuda", lambda device=None: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(cuda, "backends_of", lambda group: {"cpu": "gloo"})
        with pytest.raises(RuntimeError, match=r"there is a group with .*cpu:gloo,cuda:nccl"):
            cuda.GroupBackend(dist.group.WORLD, torch.device("cuda"))
    finally:
        dist.destroy_process_group()
