"""DeviceMesh -> process-group names and their roles: the mesh axes."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def mesh_roles(mesh: DeviceMesh) -> dict[str, str]:
    """Process-group name -> mesh axis, for every named axis of the mesh."""
    return {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}
