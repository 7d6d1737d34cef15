"""Ranks on several hosts: network namespaces, or processes with different PIPEKERNELS_HOST_IDs."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import TIMEOUT, two_hosts
from support.programs import run
from support.ranks import in_group, on_ranks

from pipekernels import Communicator, _backend
from pipekernels.comm import cuda

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)


def can_make_namespaces() -> bool:
    """Whether this is root on a machine that lets it make network namespaces."""
    name = f"pipekernels{os.getpid()}"
    if os.geteuid() or not shutil.which("ip") or os.system(f"ip netns add {name} 2>/dev/null"):
        return False
    return os.system(f"ip netns del {name}") == 0


@pytest.mark.full
def test_two_hosts() -> None:
    if not can_make_namespaces():
        pytest.skip("network namespaces cannot be made here")
    folder = Path(two_hosts.__file__).parent
    environment = {
        **os.environ, "PYTHON": sys.executable, "RANKS": "2",
        "PYTHONPATH": os.pathsep.join(map(str, (folder.parent, folder.parents[1]))),
    }  # fmt: skip
    program = folder / "two_hosts.py"
    done = run("bash", folder / "two_hosts.sh", program, code=None, env=environment)
    for rank in range(two_hosts.RANKS):
        assert f"rank {rank} on host{rank // 2} is right" in done.stdout, done.stdout + done.stderr


@in_group(two_hosts.RANKS, hosts="aabb")
def test_two_pretended_hosts(rank: int) -> None:
    two_hosts.check()


@on_ranks(4)
def test_a_store_serves_ranks_on_hosts_of_different_sizes(alone: Communicator) -> None:
    os.environ["PIPEKERNELS_HOST_ID"] = "abcc"[alone.rank]
    store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
    with Communicator.from_store(store, alone.rank, 4, timeout=TIMEOUT) as comm:
        assert comm.all_gather(torch.tensor([comm.rank])).tolist() == [0, 1, 2, 3]
        assert comm.all_reduce(torch.ones(3), "avg").tolist() == [1.0] * 3
        comm.barrier()


@on_ranks(3, killed=(2,))
def test_a_killed_rank_ends_a_communicator_over_hosts(alone: Communicator) -> None:
    os.environ["PIPEKERNELS_HOST_ID"] = "aab"[alone.rank]
    with Communicator.from_process_group(timeout=TIMEOUT) as comm:
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="(?i)gloo|connection|peer"):
            while True:
                comm.all_reduce(torch.ones(1000))


@in_group(2)
def test_cuda_tensors_between_hosts(rank: int) -> None:
    """The choice of their backend, which runs here on CPU tensors."""
    _backend.require_cuda = lambda device=None: None
    device = torch.device("cuda", 0)
    group = dist.new_group(backend="cpu:gloo")
    for wrong, says in ((None, "there is no group"), (group, "there is a group with .*gloo")):
        with pytest.raises(RuntimeError, match=f"{says}.*backend='cpu:gloo,cuda:nccl'"):
            cuda.between_hosts(wrong, 2, device, None)
    cuda.backends_of = lambda group: {"cuda": "nccl"}
    backend = cuda.between_hosts(group, 2, device, None)
    assert (backend._group, backend.device, backend.check()) == (group, device, None)
    x = torch.ones(3)
    backend.all_reduce(x, "avg", "auto")
    assert x.tolist() == [1.0] * 3
