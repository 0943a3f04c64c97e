"""Module -> for every parameter and buffer: replicated, sharded or not declared, its shape and fingerprint.

The layout is never guessed. It comes from DTensor placements, else from `shard_specs()` of tpcompile's modules, else
from the caller's `sharded`, which makes every tensor that it does not name replicated. A tensor with none of these is
not declared: differences in it are listed and never fail the check. `misfit` compares the shards of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Frozen
from tpcompile.nn.sharding import declarations_of
from tpcompile.preflight.fingerprint import bits, describe, local_of

_Shapes: TypeAlias = Mapping[str, Sequence[int] | None]
ShardedBy: TypeAlias = Callable[[str, Tensor], bool] | _Shapes | Iterable[str] | None
"""Which plain tensors are shards: (name, tensor) -> bool; fnmatch patterns; or pattern -> full shape, None for equal
shards. None declares nothing; an empty list declares every tensor replicated."""


class Layout(StrEnum):
    """How the ranks of a group hold one tensor."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    UNDECLARED = "not declared"


@dataclass(frozen=True)
class Group:
    """The group whose ranks are compared: name of its mesh axis, and its ranks in order."""

    axis: str
    ranks: tuple[int, ...]


class Weight(Frozen):
    """One parameter or buffer of one rank."""

    is_parameter: bool
    layout: Layout
    declared_by: str
    """`DTensor`, `shard_specs`, `caller` or `undeclared`."""
    dtype: str
    requires_grad: bool
    shape: tuple[int, ...]
    """Shape of this rank's part."""
    kind: str = ""
    """What Dynamo guards besides dtype and shape: DTensor or a different subclass, and the device unless CPU."""
    dim: int | None = None
    """Sharded dim, None for unknown."""
    full_shape: tuple[int | None, ...] | None = None
    """Full size of each dim; None where it is not declared, or where a different mesh axis shards the dim too."""
    print: str = ""
    """dtype, shape and bits; empty for a shard whose bits were not hashed."""


@dataclass(frozen=True)
class Declared:
    """A declared layout, and where the declaration comes from."""

    layout: Layout
    by: str
    """`DTensor`, `shard_specs`, `caller` or `undeclared`."""
    dim: int | None = None
    full_shape: tuple[int | None, ...] | None = None


def weights_of(
    module: nn.Module, *, group: Group, sharded: ShardedBy = None, with_shards: bool = False
) -> dict[str, Weight]:
    """Every parameter and buffer by name; the bits of shards are hashed only `with_shards`."""
    specs = _declared_specs(module, group)
    parameters = dict(module.named_parameters())
    found = {}
    for name, tensor in (*parameters.items(), *module.named_buffers()):
        declared = layout_by_dtensor(tensor, group) or specs.get(name) or _declared_by_caller(name, tensor, sharded)
        is_hashed = with_shards or declared.layout != Layout.SHARDED
        local = local_of(tensor)
        found[name] = Weight(
            is_parameter=name in parameters,
            layout=declared.layout,
            declared_by=declared.by,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
            shape=tuple(local.shape),
            kind=_kind(tensor, local),
            dim=declared.dim,
            full_shape=declared.full_shape,
            print=f"{describe(local)} {bits(local)}" if is_hashed else "",
        )
    return found


def _kind(tensor: Tensor, local: Tensor) -> str:
    parts = []
    if isinstance(tensor, DTensor):
        parts.append("DTensor")
    if hasattr(local, "__tensor_flatten__"):
        parts.append(type(local).__name__)
    if tensor.device.type != "cpu":
        parts.append(f"on {tensor.device.type}")
    return ", ".join(parts)


def layout_by_dtensor(tensor: Tensor, group: Group) -> Declared | None:
    """Layout over `group` by the placements of a DTensor; None for a plain tensor or a mesh without that axis."""
    if not isinstance(tensor, DTensor):
        return None
    here = _mesh_dim(tensor.device_mesh, group)
    if here is None:
        return None
    layout = Layout.REPLICATED if tensor.placements[here].is_replicate() else Layout.SHARDED
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    dim = dims.pop(here)
    if dim is None:
        return Declared(layout, "DTensor")
    # The full size of a dim that a different mesh axis shards is not known.
    full_shape = tuple(None if at in dims else size for at, size in enumerate(tensor.shape))
    return Declared(layout, "DTensor", dim, full_shape)


def _mesh_dim(mesh: DeviceMesh, group: Group) -> int | None:
    """Dim of the mesh whose ranks are this group; None when there is none."""
    names = mesh.mesh_dim_names or ()
    if group.axis in names:
        return names.index(group.axis)
    if mesh.ndim != 1:
        return None
    ranks = tuple(mesh.mesh.flatten().tolist())
    return 0 if ranks == group.ranks else None


def _declared_by_caller(name: str, tensor: Tensor, sharded: ShardedBy) -> Declared:
    if sharded is None:
        return Declared(Layout.UNDECLARED, "undeclared")
    if callable(sharded):
        layout = Layout.SHARDED if sharded(name, tensor) else Layout.REPLICATED
        return Declared(layout, "caller")
    shapes: _Shapes = {}
    if isinstance(sharded, Mapping):
        shapes = sharded
    else:
        shapes = dict.fromkeys([sharded] if isinstance(sharded, str) else sharded)
    matching = find(shapes, lambda pattern: fnmatchcase(name, pattern))
    if matching is None:
        return Declared(Layout.REPLICATED, "caller")
    shape = shapes[matching]
    full_shape = None if shape is None else tuple(shape)
    return Declared(Layout.SHARDED, "caller", full_shape=full_shape)


def _declared_specs(module: nn.Module, group: Group) -> dict[str, Declared]:
    """Layouts declared by tpcompile's own modules; a module bound to a different group says nothing about this one."""
    declared: dict[str, Declared] = {}
    for name, declaration in declarations_of(module).items():
        comm = getattr(declaration.declared_by, "comm", None)
        bound = getattr(comm, "group", None)
        ranks = [dist.get_rank()] if bound is None else dist.get_process_group_ranks(bound)  # size 1 has no group
        if comm is not None and tuple(ranks) != group.ranks:
            continue
        dim = declaration.spec.dim
        layout = Layout.REPLICATED if dim is None else Layout.SHARDED
        declared[name] = Declared(layout, "shard_specs", dim)  # parts are padded to equal shapes: `ShardSpec.take`
    return declared


def misfit(shards: ByRank[Weight]) -> str:
    """What is wrong when the shapes are neither equal nor tile the declared full shape; "" when they fit.

    A dim whose full size is not known, because a different mesh axis shards it too, is not checked.
    """
    shapes = shards.map(lambda weight: weight.shape)
    full, dim = shards.first.full_shape, shards.first.dim
    if shards.differ(lambda weight: weight.full_shape):
        return "the ranks declare different full shapes"
    if shapes.differ(len):
        return "the shards have different numbers of dims"
    if full is None:
        return "shard shapes differ, and the full shape is not declared" if shapes.differ() else ""
    if len(full) != len(shapes.first):
        return f"the shards and the declared full shape have different numbers of dims: {_text(full)}"
    possible_dims = range(len(full)) if dim is None else [dim]
    for possible_dim in possible_dims:
        if _tiles(list(shapes.values()), full, possible_dim):
            return ""
    return f"the shards do not tile the full shape {_text(full)}"


def shard_text(weight: Weight) -> str:
    """`float32[5, 4] of [10, 4] on dim 0 (DTensor)`."""
    of = "" if weight.full_shape is None else f" of {_text(weight.full_shape)}"
    dim = "" if weight.dim is None else f" on dim {weight.dim}"
    return f"{weight.dtype}{list(weight.shape)}{of}{dim} ({weight.declared_by})"


def _tiles(shapes: Sequence[Sequence[int]], full: Sequence[int | None], dim: int) -> bool:
    """True when the shards add up to the full size of `dim` and have the full size of every other dim."""
    sizes = list(zip(*shapes, strict=True))
    wanted = list(full)
    along = sizes.pop(dim)
    total = wanted.pop(dim)
    if total not in (None, sum(along)):
        return False
    return all(set(column) == {size or column[0]} for column, size in zip(sizes, wanted, strict=True))


def _text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
