"""Arguments of a collective -> ConfigError with the numbers, before any rank communicates.

Each rank checks its own arguments. Equal shapes, dtypes and options on all ranks are the caller's responsibility: a
check would need a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.ranks.groups import GroupLike, check_device, resolve_group

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
COMPLEX = frozenset({torch.complex64, torch.complex128})
INTS = frozenset({torch.int64, torch.int32, torch.int8, torch.uint8})
# What gloo and NCCL both carry.
MOVABLE = FLOATS | COMPLEX | INTS | {torch.bool}
_REDUCIBLE = {
    "sum": FLOATS | COMPLEX | INTS,
    "avg": FLOATS,
    "max": FLOATS | INTS,
    "min": FLOATS | INTS,
    "product": FLOATS | INTS,
}


def checked(name: str, x: Any, group: GroupLike, dtypes: frozenset[torch.dtype] = MOVABLE) -> dist.ProcessGroup | None:
    """The resolved group, or None when there is nothing to communicate: no group, or one of size 1."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name}: the input is a {type(x).__name__}; pass one tensor")
    if type(x) is not Tensor and hasattr(x, "placements"):
        raise ConfigError(f"{name}: the input is a DTensor; pass its local part, x.to_local()")
    if x.layout is not torch.strided:
        raise ConfigError(f"{name}: the input has layout {x.layout}; pass a dense tensor")
    if x.dtype not in dtypes:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ConfigError(f"{name}: {x.dtype} is not supported; cast to one of {', '.join(names)}")
    found = resolve_group(group)
    if found is None or found.size() == 1:
        return None
    check_device(name, x, found)
    return found


def world_size(group: dist.ProcessGroup | None) -> int:
    """Size of a group that `checked` returned."""
    return 1 if group is None else group.size()


def reducible(op: str) -> frozenset[torch.dtype]:
    """Dtypes that `op` reduces; raises ConfigError for an unknown op."""
    if not isinstance(op, str) or op not in _REDUCIBLE:
        raise ConfigError(f"all_reduce: op={op!r} is unknown; choose from {', '.join(_REDUCIBLE)}")
    return _REDUCIBLE[op]


def check_type(name: str, what: str, value: str) -> None:
    """Raise ConfigError unless a `dst` or `src` is I or R."""
    if value not in ("I", "R"):
        raise ConfigError(
            f"{name}: {what}={value!r} is unknown; choose 'I' (replicated gradient) or 'R' (partial gradient)"
        )


def checked_dim(name: str, x: Tensor, dim: int) -> int:
    """`dim` counted from the front; raises ConfigError when it is out of range."""
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ConfigError(f"{name}: dim={dim} is out of range for a tensor with {x.dim()} dims")
    return dim % x.dim()


def check_divides(name: str, x: Tensor, dim: int, world: int) -> None:
    """Raise ConfigError when the group size does not divide the size of `dim`."""
    size = x.shape[dim]
    if size % world:
        raise ConfigError(
            f"{name}: size {size} of dim {dim} is not divisible by the group size {world}; "
            f"pad it to {-(-size // world) * world}"
        )


def checked_sizes(
    name: str, what: str, sizes: Sequence[int] | None, world: int, *, total: int | None = None
) -> tuple[int, ...] | None:
    """The sizes as a tuple, or None. Raises ConfigError unless there is one per rank and they add up to `total`."""
    if sizes is None:
        return None
    is_list = isinstance(sizes, (list, tuple))
    if not is_list or not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ConfigError(f"{name}: {what}={sizes!r} must be a list of sizes, one per rank, none negative")
    if len(sizes) != world:
        raise ConfigError(f"{name}: {what} has {len(sizes)} entries for a group of {world} ranks")
    if total is not None and sum(sizes) != total:
        raise ConfigError(f"{name}: {what}={list(sizes)} add up to {sum(sizes)}, but the dim has size {total}")
    return tuple(sizes)


def check_own_size(
    name: str, x: Tensor, dim: int, sizes: tuple[int, ...] | None, group: dist.ProcessGroup | None
) -> None:
    """Raise ConfigError when this rank's size of `dim` is not the one that `sizes` has for it."""
    if sizes is None:
        return
    rank = 0 if group is None else group.rank()
    if x.shape[dim] != sizes[rank]:  # rank-dependent: uneven shards are
        raise ConfigError(
            f"{name}: size {x.shape[dim]} of dim {dim}, but sizes={list(sizes)} has {sizes[rank]} for rank {rank} "
            "of the group"
        )


def check_src(name: str, src: int, world: int) -> None:
    """Raise ConfigError when `src` is not a rank of the group."""
    if not isinstance(src, int) or not 0 <= src < world:
        raise ConfigError(f"{name}: src={src!r} is not a rank of a group of {world}; choose 0 to {world - 1}")
