"""Any spelling of a group -> the ProcessGroup of this rank, its devices, and this rank's place in it as tensor data.

A group is a ProcessGroup, the name of one, a DeviceMesh with one dim, or (mesh, dim); None is no group at all. All
spellings of one group give the same graph: the op takes the group's name.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.torch_api import c10d as adapter
from tpcompile.dist.plans import recall, remember
from tpcompile.errors import ConfigError

GroupLike: TypeAlias = dist.ProcessGroup | str | DeviceMesh | tuple[DeviceMesh, str | int] | None
_RANK_INDEX: dict[tuple[int, torch.device], Tensor] = {}


def resolve_group(group: GroupLike) -> dist.ProcessGroup | None:
    """The ProcessGroup that `group` spells; None stays None.

    Raises ConfigError, without communication, for a group this rank is not in, an unknown name, a mesh of several
    dims without a dim, and anything else.
    """
    if group is None or type(group) is dist.ProcessGroup:
        return group
    if isinstance(group, str):
        return _named(group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"the mesh has {group.ndim} dims {group.mesh_dim_names or ''}; pass (mesh, dim) or mesh[dim]"
            )
        return _of_mesh(group, 0)
    if isinstance(group, tuple):
        if len(group) != 2 or not isinstance(group[0], DeviceMesh) or not isinstance(group[1], (str, int)):
            raise ConfigError("a tuple as group must be (DeviceMesh, name or index of one of its dims)")
        return _of_mesh(*group)
    if isinstance(group, (int, float, list, dict)) or not hasattr(group, "group_name"):
        raise ConfigError(_not_a_group(group))
    return group


def check_device(name: str, x: Tensor, group: dist.ProcessGroup) -> None:
    """Raise ConfigError when the group has no backend for the device of `x`."""
    if torch.compiler.is_compiling():
        has_backend = _has_backend_constant(group.group_name, str(x.device))
    elif recall(group, x.device):
        return
    else:
        has_backend = adapter.has_backend(group, x.device)
        if has_backend:
            remember(group, True, x.device)
    if not has_backend:
        raise ConfigError(
            f"{name}: the input is on {x.device}, and group {group.group_name!r} has no backend for it; "
            "move the input, or make the group with a backend for that device"
        )


def rank_index(group: GroupLike, device: torch.device) -> Tensor:
    """This rank's place in the group as a tensor [1] int64; compiled code gets it as data, not as a number."""
    found = resolve_group(group)
    return rank_index_of("" if found is None else found.group_name, device)


@torch.compiler.assume_constant_result
def rank_index_of(group_name: str, device: torch.device) -> Tensor:
    """`rank_index` of a resolved group; "" is no group. A traced caller gets a graph input."""
    rank = adapter.group_of_name(group_name).rank() if group_name else 0
    if adapter.is_mode_tracing():
        # A fake tensor must not get into the cache; torch.tensor becomes a constant of the graph, its value is data.
        return torch.tensor([rank], device=device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _RANK_INDEX.get((rank, device), torch.full((1,), rank, dtype=torch.int64, device=device))
    if (rank, device) not in _RANK_INDEX:
        with torch.inference_mode(False):  # an inference tensor could not be saved for a later backward
            _RANK_INDEX[rank, device] = torch.full((1,), rank, dtype=torch.int64, device=device)
    return _RANK_INDEX[rank, device]


@torch.compiler.assume_constant_result
def _named(name: str) -> dist.ProcessGroup:
    try:
        return adapter.group_of_name(name)
    except (RuntimeError, ValueError) as error:
        known = ", ".join(adapter.known_group_names()) or "none"
        raise ConfigError(
            f"no group is named {name!r} on this rank, which is in: {known}; only members may call, and only while the "
            "group exists"
        ) from error


@torch.compiler.assume_constant_result
def _has_backend_constant(group_name: str, device: str) -> bool:
    return adapter.has_backend(adapter.group_of_name(group_name), torch.device(device))


def _of_mesh(mesh: DeviceMesh, dim: str | int) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if isinstance(dim, str) and dim not in names:
        raise ConfigError(f"the mesh has no dim {dim!r}; its dims are {list(names)}")
    if not isinstance(dim, str) and not 0 <= dim < mesh.ndim:
        raise ConfigError(f"dim {dim} is out of range for a mesh with {mesh.ndim} dims {list(names)}")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"this rank is not in the mesh {list(names)}; only its members may call")
    return mesh.get_group(dim)


def _not_a_group(group: Any) -> str:
    if adapter.is_non_member(group):
        return "this rank is not in the group (new_group returned NON_GROUP_MEMBER); only members may call"
    return f"group is a {type(group).__name__}; pass a ProcessGroup, its name, a 1-D DeviceMesh, (mesh, dim) or None"
