"""What a process knows of its rank without a call of Python -> the same by a call, which a profiler sees.

Methods of process groups are in C, and attributes of a mesh are read without a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any
from unittest import mock

from torch.distributed.device_mesh import DeviceMesh

from tpcompile.torch_api import c10d


def _method(real: Any) -> Any:
    def rank(self: Any) -> Any:
        return real.__get__(self)()

    return rank


def _field(name: str) -> property:
    def get(self: Any) -> Any:
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(name) from None

    return property(get, lambda self, value: vars(self).__setitem__(name, value))


_GROUPS = {kind: _method(vars(kind)["rank"]) for kind in c10d.WITH_RANK}
_FIELDS = {name: _field(name) for name in ("_rank", "_coordinate_on_dim")}
_ASKED = [vars(DeviceMesh).get(name) for name in ("get_rank", "get_local_rank", "get_coordinate", "mesh")]
_FUNCTIONS = [getattr(one, "fget", None) or one for one in (*_ASKED, *_FIELDS.values()) if one is not None]
OF_MESH: dict[int, CodeType] = {id(function.__code__): function.__code__ for function in _FUNCTIONS}
CODES = OF_MESH | {id(function.__code__): function.__code__ for function in _GROUPS.values()}
"""Of functions that return the rank, or a coordinate, by id."""


@contextmanager
def laid() -> Iterator[None]:
    """Lay the wires, and take them away at the end."""
    with ExitStack() as stack:
        for kind, method in _GROUPS.items():
            stack.enter_context(mock.patch.object(kind, "rank", method))
        for name, field in _FIELDS.items():
            stack.enter_context(mock.patch.object(DeviceMesh, name, field, create=True))
        yield
