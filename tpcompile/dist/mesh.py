"""DeviceMesh -> process-group names and their roles: the mesh axes; group -> groups of its neighbouring ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError

_NEIGHBOURS: dict[tuple[str, int], dist.ProcessGroup] = {}


def mesh_roles(mesh: DeviceMesh) -> dict[str, str]:
    """Process-group name -> mesh axis, for every named axis of the mesh."""
    return {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}


def neighbours(group: dist.ProcessGroup | None, count: int) -> dist.ProcessGroup | None:
    """The group of `count` consecutive ranks of `group` that this rank is in, made once; None for count 1.

    Every rank of `group` must call it, with the same count. Raises ConfigError when `count` does not divide the size.
    """
    if group is None or count == 1:
        return None
    if group.size() % count:
        raise ConfigError(f"{count} replicas do not divide the {group.size()} ranks of the group")
    key = (group.group_name, count)
    if key not in _NEIGHBOURS:
        ranks = dist.get_process_group_ranks(group)
        start = group.rank() // count * count
        # Only members call: with tp groups in a larger world the other groups' ranks know nothing of this one.
        _NEIGHBOURS[key] = dist.new_group(
            ranks[start : start + count], use_local_synchronization=True, group_desc="tp_replicas"
        )
    return _NEIGHBOURS[key]
