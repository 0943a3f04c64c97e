"""Which differences between ranks the hash of what their calls can reach has, and which it has not."""

from __future__ import annotations

import functools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.dryrun.reach import CannotTellError, state_of
from tpcompile.ranks.domain import mesh_roles
from tpcompile.target import Target
from tpcompile.typecheck.check import fake_ranks


class Model(nn.Module):
    """What the tests change; tensors have no values, as in a dry run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8, device="meta"), nn.Dropout(0.5)
        self.scale: Any = 1
        self.act: Callable[[Tensor], Tensor] = F.silu

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return self.act(self.linear(x)) * self.scale


class Box:
    """An object with attributes."""

    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    """An object with a slot."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def state(change: Callable[[Model], object] = lambda model: None, *, rank: int = 0, modules: Sequence[str] = ()) -> str:
    """The hash of a model that was built anew as that rank of a mesh, and changed."""
    with fake_ranks(8, rank=rank):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = Model()
        change(model)
        inputs = (torch.empty(2, 8, device="meta"),)
        return state_of(Target(program=model, inputs=inputs), mesh_roles(mesh), modules)


def test_ranks_that_build_alike_have_one_hash() -> None:
    assert len({state(rank=rank) for rank in (0, 2, 6)}) == 1


def closure(value: object) -> Callable[[Tensor], Tensor]:
    return lambda x: x if value else x * 2


def cached(value: int) -> Callable[[Tensor], Tensor]:
    """A function of functools.cache that was called with the value."""
    function = functools.cache(lambda x: x)
    function(value)
    return function


def set_act(value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model, "act", value)


def set_scale(value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model, "scale", value)


def patched_class(model: Model) -> None:
    model.act = type("Act", (), {"__call__": lambda self, x: x})()


CHANGES: dict[str, Callable[[Model], object]] = {
    "number": set_scale(2),
    "type of a number": set_scale(1.0),
    "closure": set_act(closure(0)),
    "other closure": set_act(closure(1)),
    "default": set_act(lambda x, by=2: x),
    "other default": set_act(lambda x, by=3: x),
    "partial": set_act(functools.partial(F.gelu, approximate="tanh")),
    "other partial": set_act(functools.partial(F.gelu, approximate="none")),
    "object": set_scale(Box(1)),
    "other object": set_scale(Box(2)),
    "slot": set_scale(Slotted(1)),
    "other slot": set_scale(Slotted(2)),
    "object behind a weak reference": lambda model: [setattr(model, "scale", weakref.ref(model.linear))],
    "class": patched_class,
    "cache": set_act(cached(1)),
    "other cache": set_act(cached(2)),
    "values of a tensor": set_scale(torch.ones(3)),
    "other values of a tensor": set_scale(torch.zeros(3)),
    "shape": set_scale(torch.empty(3, device="meta")),
    "stride": set_scale(torch.empty(6, device="meta")[::2]),
    "dtype": set_scale(torch.empty(3, device="meta", dtype=torch.int64)),
    "layer more": lambda model: model.add_module("more", nn.Linear(8, 8, device="meta")),
    "hook": lambda model: model.linear.register_forward_hook(lambda *arguments: None),
    "frozen": lambda model: model.linear.requires_grad_(False),
    "training": lambda model: model.eval(),
    "tied": lambda model: model.register_parameter("tied", model.linear.weight),
    "generator": set_scale(torch.Generator().manual_seed(1)),
    "other generator": set_scale(torch.Generator().manual_seed(2)),
    "order of a dict": set_scale({"a": 1, "b": 2}),
    "other order of a dict": set_scale({"b": 2, "a": 1}),
}


def test_what_calls_can_reach_is_in_the_hash() -> None:
    hashes = {"none": state(), **{name: state(change) for name, change in CHANGES.items()}}
    by_hash: dict[str, list[str]] = {}
    for name, found in hashes.items():
        by_hash.setdefault(found, []).append(name)
    assert [names for names in by_hash.values() if len(names) > 1] == []


def test_what_decides_nothing_is_not_in_the_hash() -> None:
    assert state(set_scale(logging.getLogger("one"))) == state(set_scale(logging.getLogger("one")))
    assert state(lambda model: torch.manual_seed(7)) == state(lambda model: torch.manual_seed(8))


def test_a_function_of_an_installed_module_that_was_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = state(set_act(nn.SiLU()))
    monkeypatch.setattr(F, "silu", lambda x, inplace=False: x)
    assert state(set_act(nn.SiLU())) != plain


def test_a_setting_of_the_process_is_seen() -> None:
    plain = state()
    with torch._dynamo.config.patch(assume_static_by_default=False):
        assert state() != plain


def test_a_global_of_a_users_module_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("users_program")
    monkeypatch.setitem(sys.modules, "users_program", module)
    vars(module)["RANK"] = 1
    first = state(modules=["users_program"])
    vars(module)["RANK"] = 2
    assert state(modules=["users_program"]) != first


def test_a_group_of_another_axis_is_seen() -> None:
    def with_group(axis: str, rank: int) -> str:
        with fake_ranks(8, rank=rank):
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            return state_of(Target(program=nn.Identity(), inputs=(mesh.get_group(axis),)), mesh_roles(mesh), ())

    assert with_group("tp", 0) == with_group("tp", 3)
    assert with_group("tp", 0) != with_group("dp", 0)


def test_what_is_not_visible_is_not_taken_for_equal() -> None:
    with pytest.raises(CannotTellError, match="generator"):
        state(set_scale(value for value in "abc"))
