"""Who made a callable is read off its file; wrappers of torch and of Python are looked through."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass

from tpcompile.torch_api import makers


def mine(graph: Any) -> None:
    pass


class Mine(CustomGraphPass):
    def __call__(self, graph: Any) -> None:
        pass

    def uuid(self) -> str:
        return "mine"

    def method(self, graph: Any) -> None:
        pass


def wrapped_by_torch() -> Any:
    return torch.compiler.disable(mine)


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (mine, mine),
        ([None, ("a", mine)], mine),
        ({"fw": functools.partial(mine, graph=1)}, mine),
        (functools.partial(map, mine), mine),
        (aot_autograd(fw_compiler=mine), mine),
        (wrapped_by_torch(), mine),
        (Mine(), Mine),
        (Mine, Mine),
        (Mine().method, Mine.method),
        (torch.library.CustomOpDef.__call__, None),
        (F.silu, None),
        (operator.add, None),
        (functools.lru_cache(F.silu), None),
        (torch.ops.aten.silu.default, None),
        ("reorder_compute_for_overlap", None),
        (torch.nn.Linear(2, 2), None),
        (makers.made_by_others, None),
    ],
)
def test_the_function_or_class_of_others_is_found(value: Any, made: Any) -> None:
    assert makers.made_by_others(value) == ([] if made is None else [made])


def test_a_file_counts_not_a_name() -> None:
    """A user's folder may be called torch, and a user's module may claim to be torch's."""
    assert not makers.is_torchs_file("/home/me/torch/nn/mine.py")
    assert not makers.is_torchs_file("/home/me/tpcompile/fastpath/mine.py")
    assert makers.is_torchs_file(F.__file__)
    namespace: dict[str, Any] = {"__name__": "torch.nn.functional"}
    exec(compile("def f(): pass", "/home/me/mine.py", "exec"), namespace)
    assert makers.made_by_others(namespace["f"])


def test_programs_that_stand_for_a_users_are_not_ours() -> None:
    from tpcompile.gate.faults.program import RankBranch

    assert makers.made_by_others(RankBranch.forward) == [RankBranch.forward]
