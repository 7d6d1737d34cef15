"""The mesh dimension whose ranks hold the stages of an SPMD pipeline."""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipekernels._arguments import check_kind
from pipekernels._torch_private import enclosing_mesh, group_named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

if dist.is_available():
    # Import now: the default group at import becomes the default argument of its functions. torch's
    # compiler imports it too, perhaps after a group was made, and the functions would keep that.
    import torch.distributed.nn.functional


@dataclass(frozen=True)
class Axis:
    """The ranks along one mesh dimension that have this rank's coordinates in all others."""

    group_name: str
    """Not the group: graphs and modules hold this object, and a group that outlives
    ``destroy_process_group()`` still has threads when the interpreter ends (pytorch#190489)."""
    device_type: str
    ranks: list[int]
    """Ranks in the default group, by stage."""
    index: int
    random_key: int
    """Equal on ranks that work on the same activations, and distinct otherwise."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None, name: str, replicated: Collection[str] = ()) -> Axis:
        """The dimension ``name`` of ``mesh``, by default of the enclosing mesh.

        Args:
            mesh: has named dimensions.
            name: of the dimension.
            replicated: dimensions whose ranks work on the same activations.

        Raises:
            ValueError: there is no mesh, it lacks a dimension or this rank, or ``name`` is among
                ``replicated``.
            TypeError: ``mesh`` is not a ``DeviceMesh``.
        """
        from torch.distributed.device_mesh import DeviceMesh  # Slow to import.

        if mesh is None:
            try:
                mesh = enclosing_mesh()
            except RuntimeError:
                raise ValueError(
                    "there is no device mesh; pass mesh= or call this inside `with mesh:`"
                ) from None
        check_kind("mesh", mesh, DeviceMesh, "a DeviceMesh")
        _collect_at_exit()
        if name in replicated:
            raise ValueError(
                f"replicated_axis_names has {name!r}, whose ranks hold different stages; leave it "
                "out"
            )
        ranks, replicas = _ranks_along(mesh, [name]), _ranks_along(mesh, replicated)
        index = ranks.index(dist.get_rank())
        group_name = mesh.get_group(name).group_name
        return cls(group_name, mesh.device_type, ranks, index, random_key=min(replicas))

    @property
    def group(self) -> dist.ProcessGroup:
        """Their group. RuntimeError if it was destroyed."""
        return group_named(self.group_name)

    @property
    def device(self) -> torch.device:
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.ranks) - 1


@functools.cache
def _collect_at_exit() -> None:
    """Collect groups in reference cycles before the interpreter shuts down: Gloo's threads may
    still need its lock (pytorch#190489). Loading torch's compiler, which the first call of a
    function that disables it does, leaves cycles that refer to callers' frames."""
    atexit.register(gc.collect)


def _ranks_along(mesh: DeviceMesh, names: Collection[str]) -> list[int]:
    """Ranks whose place in the mesh differs from this rank's in the named dimensions alone."""
    known = mesh.mesh_dim_names or ()
    for name in names:
        if name not in known:
            raise ValueError(
                f"the mesh has no dimension {name!r}; its dimensions are {list(known)} "
                "(mesh_dim_names of init_device_mesh)"
            )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; call this on its ranks only"
        )
    where = [slice(None) if n in names else i for n, i in zip(known, place, strict=True)]
    return mesh.mesh[tuple(where)].flatten().tolist()
