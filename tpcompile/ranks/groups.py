"""Any spelling of a group -> its ProcessGroup, its devices, and this rank's index in it as tensor data.

A group is a ProcessGroup, its name, a 1-D DeviceMesh, or (mesh, dim); None means no group. All spellings of one group
give the same graph, since the op takes the group's name.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError
from tpcompile.ranks.per_group import recall, remember
from tpcompile.torch_api import c10d

GroupLike: TypeAlias = dist.ProcessGroup | str | DeviceMesh | tuple[DeviceMesh, str | int] | None
# By the group itself: after destroy_process_group a new group may have its name.
_NEIGHBOURS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_num_made: Counter[str] = Counter()
_RANK_INDEX: dict[tuple[int, torch.device], Tensor] = {}


def resolve_group(group: GroupLike) -> dist.ProcessGroup | None:
    """The ProcessGroup that `group` spells; None stays None.

    Raises ConfigError, without communication, for a group this rank is not in, an unknown name, a mesh of several
    dims without a dim, and anything else.
    """
    if group is None:
        return None
    if type(group) is dist.ProcessGroup:
        return group
    if isinstance(group, str):
        return _named(group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            dims = group.mesh_dim_names or ""
            raise ConfigError(f"the mesh has {group.ndim} dims {dims}; pass (mesh, dim) or mesh[dim]")
        return _of_mesh(group, 0)
    if isinstance(group, tuple):
        is_pair = len(group) == 2 and isinstance(group[0], DeviceMesh) and isinstance(group[1], (str, int))
        if not is_pair:
            raise ConfigError("a tuple as group must be (DeviceMesh, name or index of one of its dims)")
        return _of_mesh(*group)
    if isinstance(group, (int, float, list, dict)) or not hasattr(group, "group_name"):
        if c10d.is_non_member(group):
            raise ConfigError(
                "this rank is not in the group (new_group returned NON_GROUP_MEMBER); only members may call"
            )
        kind = type(group).__name__
        raise ConfigError(f"group is a {kind}; pass a ProcessGroup, its name, a 1-D DeviceMesh, (mesh, dim) or None")
    return group


def check_device(name: str, x: Tensor, group: dist.ProcessGroup) -> None:
    """Raise ConfigError when the group has no backend for the device of `x`."""
    if torch.compiler.is_compiling():
        has_backend = _has_backend_constant(group.group_name, str(x.device))
    elif recall(group, x.device):
        has_backend = True
    else:
        has_backend = c10d.has_backend(group, x.device)
        if has_backend:
            remember(group, True, x.device)
    if not has_backend:
        raise ConfigError(
            f"{name}: the input is on {x.device}, and group {group.group_name!r} has no backend for it; "
            "move the input, or make the group with a backend for that device"
        )


def rank_index(group: GroupLike, device: torch.device) -> Tensor:
    """This rank's index in the group as a tensor [1] int64 on `device`: data in compiled code, no Python constant."""
    found = resolve_group(group)
    return rank_index_of("" if found is None else found.group_name, device)


@torch.compiler.assume_constant_result
def rank_index_of(group_name: str, device: torch.device) -> Tensor:
    """`rank_index` of a resolved group; "" is no group. A traced caller gets a graph input."""
    rank = c10d.group_of_name(group_name).rank() if group_name else 0
    if c10d.is_mode_tracing():
        # A fake tensor must not enter the cache; torch.tensor becomes a constant of the graph, its value is data.
        return torch.tensor([rank], device=device)
    if (rank, device) in _RANK_INDEX:
        return _RANK_INDEX[rank, device]
    with torch.inference_mode(False):  # an inference tensor could not be saved for a later backward
        index = torch.full((1,), rank, dtype=torch.int64, device=device)
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not is_capturing:  # a tensor made during capture lives in the memory pool of that CUDA graph
        _RANK_INDEX[rank, device] = index
    return index


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


@contextmanager
def first_index(index: Tensor) -> Iterator[None]:
    """Rank 0's index on the tensor's device is this tensor, within the context: one that stands for all ranks."""
    saved = dict(_RANK_INDEX)
    _RANK_INDEX[0, index.device] = index
    try:
        yield
    finally:
        _RANK_INDEX.clear()
        _RANK_INDEX.update(saved)


@torch.compiler.assume_constant_result
def _named(name: str) -> dist.ProcessGroup:
    try:
        return c10d.group_of_name(name)
    except (RuntimeError, ValueError) as error:
        known = ", ".join(sorted(name for _, name in c10d.known_groups())) or "none"
        raise ConfigError(
            f"no group is named {name!r} on this rank, which is in: {known}; only members may call, and only while the "
            "group exists"
        ) from error


@torch.compiler.assume_constant_result
def _has_backend_constant(group_name: str, device: str) -> bool:
    return c10d.has_backend(c10d.group_of_name(group_name), torch.device(device))


def _of_mesh(mesh: DeviceMesh, dim: str | int) -> dist.ProcessGroup:
    names = list(mesh.mesh_dim_names or ())
    if isinstance(dim, str):
        if dim not in names:
            raise ConfigError(f"the mesh has no dim {dim!r}; its dims are {names}")
    elif not 0 <= dim < mesh.ndim:
        raise ConfigError(f"dim {dim} is out of range for a mesh with {mesh.ndim} dims {names}")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"this rank is not in the mesh {names}; only its members may call")
    return mesh.get_group(dim)
