"""``cpu:pipekernels`` beside the backend of another device.

The other device is torch's ``meta``, whose tensors have no elements, with torch's own backend for
tests, ``fake``, whose collectives do nothing. What is tested is who is called, and what becomes of
the groups; no test needs a GPU.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import in_group
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)
pytest.importorskip("torch.testing._internal.distributed.fake_pg")  # Registers another.

SIGNATURE = inspect.signature(dist.new_group)
MIXED = "cpu:pipekernels,meta:fake"


@pytest.fixture(params=[MIXED, "meta:fake,cpu:pipekernels"])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The default group, of this process alone."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    assert not dist.is_initialized() and not registered()


def registered() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)


class Recorder:
    """Stands in the place of the second group and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **fields: Any) -> Any:
            self.calls.append((name, args))
            return SimpleNamespace(wait=lambda: True)

        return call


# Of two tensors and the group; one for each form of arguments.
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "allreduce": lambda x, y, group: dist.all_reduce(x),
    "allgather": lambda x, y, group: dist.all_gather([x], y),
    "_allgather_base": lambda x, y, group: group._allgather_base(x, y, AllgatherOptions()),
    "scatter": lambda x, y, group: dist.scatter(x, [y], 0),
    "alltoall": lambda x, y, group: dist.all_to_all([x], [y]),
    "alltoall_base": lambda x, y, group: group.alltoall_base(x, y, [], [], AllToAllOptions()),
}
NOT_ON_META: dict[str, Callable[[Any, Any, Any], Any]] = {  # Torch does not have these there.
    "allreduce_coalesced": (
        lambda x, y, group: group.allreduce_coalesced([x], dist.AllreduceCoalescedOptions())
    ),
    "allgather_coalesced": lambda x, y, group: group.allgather_coalesced([[x]], [y]),
}


@pytest.mark.parametrize("name", CALLS | NOT_ON_META)
def test_calls_with_tensors_of_another_device_are_handed_over(name: str, group: Any) -> None:
    call = (CALLS | NOT_ON_META)[name]
    x, y = (torch.empty(3, device="meta") for _ in range(2))
    if name in CALLS:
        call(x, y, group)
        assert len(registered()) == 2  # Torch has made the second group, and takes the arguments.
    recorder = group._device_groups["meta"] = Recorder()
    call(x, y, group)
    del group._device_groups["meta"]
    [(called, args)] = recorder.calls
    assert called == name
    assert any(given is x for given in torch.utils._pytree.tree_leaves(args))


def test_calls_that_torch_joins_or_makes_in_cpp_are_handed_over(group: Any) -> None:
    recorder = group._device_groups["meta"] = Recorder()
    x = torch.empty(3, device="meta")
    with dist.distributed_c10d._coalescing_manager(device=torch.device("meta")):
        dist.all_reduce(x)
    with pytest.raises(RuntimeError):  # The recorder's works are not torch's.
        dist._broadcast_coalesced(group, [x, x[:2]], 1 << 20, 0)
    del group._device_groups["meta"]
    joined = ["_start_coalescing", "allreduce_coalesced", "_end_coalescing"]
    assert [name for name, _ in recorder.calls] == [*joined, "broadcast"]


def test_the_cpu_keeps_its_communicator(group: Any) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.barrier()
    objects = [None]
    dist.all_gather_object(objects, {"rank": 0})
    assert objects == [{"rank": 0}]
    assert len(registered()) == 1  # There is no second group before it is needed.
    with pytest.raises(RuntimeError, match="No backend type .*meta"):
        group._get_backend(torch.device("meta"))
    dist.all_reduce(torch.empty(3, device="meta"))
    assert group._get_backend(torch.device("meta")) is not None
    assert dist.get_backend_config(registered()[1]) == "meta:fake"


@pytest.mark.parametrize("name", ["send", "recv", "recv_anysource"])
def test_point_to_point_calls_that_might_wait_for_each_other_are_refused(
    name: str, group: Any
) -> None:
    message = rf"{name} of a tensor on meta needs a group.*new_group\(backend="
    with pytest.raises(NotImplementedError, match=message):
        place = (0,) if name == "recv_anysource" else (0, 0)
        getattr(group, name)([torch.empty(3, device="meta")], *place)


@pytest.mark.parametrize("backend", ["pipekernels", "cpu:pipekernels,meta:pipekernels"])
def test_a_device_without_a_backend_is_an_error(backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="takes tensors on meta: name one.*cuda:nccl"):
            dist.all_reduce(torch.empty(3, device="meta"))
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
@in_group(3)
def test_other_groups_come_and_go(rank: int, tmp_path: Path) -> None:
    dist.destroy_process_group()
    store = f"file://{tmp_path}/other"
    dist.init_process_group(MIXED, init_method=store, rank=rank, world_size=3)
    x = torch.empty(3, device="meta")
    unsorted: Any = {"sort_ranks": False} if "sort_ranks" in SIGNATURE.parameters else {}
    order = [2, 0] if unsorted else [0, 2]
    group = dist.new_group(order, **unsorted)
    if rank in order:
        dist.all_reduce(x, group=group)
        other = group._device_groups["meta"]
        assert dist.get_process_group_ranks(other) == order
        assert dist.get_rank(other) == order.index(rank) and other.size() == 2
        assert len(registered()) == 3
        dist.destroy_process_group(group)
        assert len(registered()) == 1
    dist.all_reduce(x)
    assert len(registered()) == 2
    whole = torch.ones(1)
    dist.all_reduce(whole)
    assert whole.item() == 3
    dist.group.WORLD.abort()
    dist.destroy_process_group()
    assert not registered()
