"""A mesh and one of its axes -> the ranks that must compile the same programs; names of its groups."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError
from tpcompile.evidence.text.ranks import exact_ranks


class Domain(NamedTuple):
    """Ranks that must compile the same programs."""

    axis: str
    members: list[int]
    """Global ranks."""
    roles: dict[str, str] | None
    """Roles of the groups in the mesh; None without one."""
    coordinate: int
    """Place of this rank among the members."""
    coordinates: dict[str, int] = {}
    """Place of this rank along each axis of the mesh."""

    @property
    def tp_size(self) -> int:
        """Ranks over which tensors are sharded, as far as is known: without a mesh nothing is known of shards."""
        return 1 if self.roles is None else len(self.members)

    @property
    def name(self) -> str:
        """`tp 0-3`."""
        return f"{self.axis} {exact_ranks(self.members)}"


def mesh_roles(mesh: DeviceMesh) -> dict[str, str]:
    """Process-group name -> mesh axis, for every named axis of the mesh."""
    return {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}


def domain_of(mesh: DeviceMesh | None, axis: str) -> Domain:
    """The ranks of one group of the axis; without a mesh, all ranks."""
    if not dist.is_initialized():
        raise ConfigError("no process group; call torch.distributed.init_process_group first")
    if mesh is None:
        return Domain("world", list(range(dist.get_world_size())), None, dist.get_rank())
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ConfigError(f"the mesh has no axis {axis!r}; it has {', '.join(names) or 'none'}")
    members = sorted(dist.get_process_group_ranks(mesh.get_group(axis)))
    at = {name: mesh.get_local_rank(name) for name in names}
    return Domain(axis, members, mesh_roles(mesh), at[axis], at)


def places_in(mesh: DeviceMesh | None) -> dict[int, dict[str, int]]:
    """Rank -> its place along each axis, of all ranks of the mesh; empty without names."""
    if mesh is None or not mesh.mesh_dim_names:
        return {}
    places = itertools.product(*map(range, mesh.mesh.shape))
    ranks = mesh.mesh.flatten().tolist()
    return {rank: dict(zip(mesh.mesh_dim_names, place, strict=True)) for rank, place in zip(ranks, places, strict=True)}


ALONE = Domain("world", [0], None, 0)
"""A program without a process group."""
