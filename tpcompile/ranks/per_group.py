"""ProcessGroup + key -> a value that lives as long as the group's object: what need not be worked out twice."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch.distributed as dist

_MAX_KEPT = 4096
# One flat dictionary by the group's id: a second lookup, or a dereferenced weak reference, would cost at every call.
KEPT: dict[tuple[Any, ...], Any] = {}
"""(id of the group, *key) -> value; read it directly only where every step of Python counts."""
_GROUPS: dict[int, weakref.ref[Any]] = {}


def recall(group: dist.ProcessGroup, *what: Hashable) -> Any:
    """The value given to `remember` for this group and key, else None."""
    return KEPT.get((id(group), *what))


def remember(group: dist.ProcessGroup, value: Any, *what: Hashable) -> None:
    """Keep a value until the group's object dies; a new object may then get the same id."""
    key = id(group)
    if key not in _GROUPS:
        _GROUPS[key] = weakref.ref(group, lambda _: _forget(key))
    if len(KEPT) >= _MAX_KEPT:  # shapes that never repeat: drop all, so that memory does not grow
        KEPT.clear()
    KEPT[key, *what] = value


def _forget(key: int) -> None:
    del _GROUPS[key]
    for kept in [kept for kept in KEPT if kept[0] == key]:
        del KEPT[kept]
