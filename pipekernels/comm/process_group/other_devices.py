"""Groups for tensors on devices that a group of the backend ``pipekernels`` does not serve itself.

Torch's loop over ``"cpu:pipekernels,cuda:nccl"`` ends at a backend that is a whole group, as ours
is. So each other device has a second group, of the backend that the string names for it.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def other_device(values: Sequence[Any]) -> torch.device | None:
    """The device of the first tensor in these nested lists that is not on the CPU."""
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_cpu:
                return value.device
        elif isinstance(value, (list, tuple)) and (found := other_device(value)) is not None:
            return found
    return None


def check_point_to_point(call: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise NotImplementedError if calls of ``batch_isend_irecv`` could wait for each other.

    Torch joins them where the same holds, but only for groups that programs hand to it.
    """
    if type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing:
        backend = dist.get_backend(group).partition(":")[2]
        raise NotImplementedError(
            f"{call} of a tensor on {device} over {backend}: torch joins the calls of "
            "batch_isend_irecv, which else may wait for each other, only in a group of that "
            f"backend alone; make one by new_group(backend={backend!r})"
        )


class OtherGroups:
    """Torch's groups for other devices; each is made at the first call for it.

    Only then torch knows what the string names. The group that they belong to is an argument of
    the methods, as an attribute would be a reference cycle.
    """

    def __init__(self, timeout: datetime.timedelta, backend_options: Any) -> None:
        self._timeout = timeout
        self._backend_options = backend_options
        self._made: dict[str, dist.ProcessGroup] = {}  # By type of device.
        self._making = threading.Lock()

    def made(self, device: torch.device) -> dist.ProcessGroup | None:
        """The group for ``device`` if there has been a call for it."""
        return self._made.get(device.type)

    def get(self, owner: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        """The group for ``device``; all ranks of ``owner`` make it together.

        Raises:
            ValueError: no backend is named for the device.
        """
        with self._making:
            if device.type not in self._made:
                self._made[device.type] = self._make(owner, device.type)
            return self._made[device.type]

    def _make(self, owner: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
        config = dist.get_backend_config(owner)
        named = dict(pair.split(":") for pair in config.split(","))
        if named.get(device, "pipekernels") == "pipekernels":
            raise ValueError(
                f"the group's backends are {config!r}, and none of them takes tensors on {device}: "
                "name one for each device, as in init_process_group('cpu:pipekernels,cuda:nccl')"
            )
        ranks = dist.get_process_group_ranks(owner)
        # Torch sorts ranks by default; where it can leave them unsorted, it has this argument.
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        group: dist.ProcessGroup = dist.new_group(
            ranks, self._timeout, f"{device}:{named[device]}", self._backend_options,
            use_local_synchronization=True, **order,
        )  # fmt: skip
        return group

    def abort(self) -> None:
        """Abort all groups."""
        for group in self._made.values():
            group.abort()

    def destroy(self, owner: dist.ProcessGroup) -> None:
        """Destroy all groups; with the default group torch does that itself."""
        made, self._made = self._made, {}
        if owner is not dist.group.WORLD:
            for group in made.values():
                dist.destroy_process_group(group)
