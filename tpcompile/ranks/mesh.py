"""DeviceMesh -> process-group names and their mesh axes; group -> its subgroups of consecutive ranks."""

from __future__ import annotations

import weakref
from collections import Counter

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError
from tpcompile.torch_api import c10d

# By the group itself: after destroy_process_group a new group may have its name.
_NEIGHBOURS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_num_made: Counter[str] = Counter()


def mesh_roles(mesh: DeviceMesh) -> dict[str, str]:
    """Process-group name -> mesh axis, for every named axis of the mesh."""
    return {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}


def neighbours(group: dist.ProcessGroup | None, count: int) -> dist.ProcessGroup | None:
    """The group of `count` consecutive ranks of `group` around this rank, made once; None for count 1.

    Every rank of `group` must call it, with the same count. Raises ConfigError when `count` does not divide the size.
    """
    if group is None or count == 1:
        return None
    if group.size() % count:
        raise ConfigError(f"{count} replicas do not divide the {group.size()} ranks of the group")
    made = _NEIGHBOURS.setdefault(group, {})
    if count not in made:
        ranks = dist.get_process_group_ranks(group)
        start = group.rank() // count * count
        # The store may still hold the keys of a group that was destroyed, hence the number.
        _num_made[group.group_name] += 1
        number = _num_made[group.group_name]
        name = f"{group.group_name}/replicas/{count}/{start}/{number}"
        members = ranks[start : start + count]
        made[count] = c10d.new_named_group(members, name, "tp_replicas")
    return made[count]
