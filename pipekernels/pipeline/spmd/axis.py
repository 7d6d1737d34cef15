"""The mesh dimension whose ranks hold the stages of an SPMD pipeline."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from pipekernels._arguments import check_kind
from pipekernels._torch_private import enclosing_mesh
from pipekernels.device.streams import with_index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Axis(NamedTuple):
    """The ranks along one mesh dimension that have this rank's coordinates in all others."""

    group: dist.ProcessGroup
    ranks: list[int]
    """Ranks in the default group, by stage. In ``group`` they may have another order."""
    stage: int
    """This rank's."""
    random_key: int
    """Equal on ranks that work on the same activations, and distinct otherwise."""
    device: torch.device

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.ranks) - 1


def axis_of(mesh: DeviceMesh | None, name: str, replicated: Collection[str] = ()) -> Axis:
    """The dimension ``name`` of ``mesh``, by default of the enclosing mesh. The ranks along the
    dimensions ``replicated`` work on the same activations.

    Raises:
        ValueError: there is no mesh, it lacks a dimension or this rank, or ``replicated`` has
            ``name``.
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
    names = mesh.mesh_dim_names or ()
    if name not in names or not {*replicated} <= {*names} - {name}:
        raise ValueError(
            f"model_axis_name is {name!r} and replicated_axis_names is {list(replicated)}; they "
            f"must be different dimensions of the mesh, which has {list(names)} (mesh_dim_names of "
            "init_device_mesh)"
        )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; call this on its ranks only"
        )
    dims = list(zip(names, place, strict=True))
    along = tuple(slice(None) if each == name else i for each, i in dims)
    first_replica = tuple(0 if each in replicated else i for each, i in dims)
    return Axis(
        group=mesh.get_group(name),
        ranks=mesh.mesh[along].tolist(),
        stage=dict(dims)[name],
        random_key=int(mesh.mesh[first_replica]),
        device=with_index(mesh.device_type),
    )
