"""A mesh and one of its axes -> the ranks that must compile alike."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError


def members_of(mesh: DeviceMesh | None, axis: str) -> list[int]:
    """Global ranks that must compile alike."""
    if not dist.is_initialized():
        raise ConfigError("Sentinel needs a process group; call torch.distributed.init_process_group first")
    if mesh is None:
        return list(range(dist.get_world_size()))
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ConfigError(f"the mesh has no axis {axis!r}; it has {', '.join(names) or 'none'}")
    return sorted(dist.get_process_group_ranks(mesh.get_group(axis)))
