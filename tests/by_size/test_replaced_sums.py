"""Graphs with an op in place of a sum: what is replaced, what stays, and the names of torch that it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tpcompile.by_size.op import OP
from tpcompile.by_size.setting import ReplacingPass
from tpcompile.torch_api.c10d import ops

X = torch.ones(4, 8)


class Always:
    """Replaces every sum that the pass asks about."""

    def __init__(self, rows: str = "64:one_shot") -> None:
        self.rows = rows

    def rows_for(self, x: Tensor, group_name: str) -> str:
        assert group_name == "0"
        return self.rows

    def pushes(self, x: Tensor, group_name: str) -> bool:
        return False

    def identity(self) -> str:
        return self.rows


def waited(x: Tensor, op: str = "sum") -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x, op, "0"))


def apart(x: Tensor) -> Tensor:
    pending = ops.all_reduce(x, "sum", "0")
    product = x * 2
    return ops.wait_tensor(pending) + product


def read_before(x: Tensor) -> Any:
    pending = ops.all_reduce(x, "sum", "0")
    return ops.wait_tensor(pending), pending


def graph_of(function: Any) -> Graph:
    mode = FakeTensorMode()
    graph: Graph = make_fx(function)(mode.from_tensor(X)).graph
    return graph


def replaced(function: Any, chooser: Always) -> int:
    """How many ops are in the graph of the function behind the pass."""
    graph = graph_of(function)
    ReplacingPass(OP, chooser)(graph)
    graph.lint()
    return len(graph.find_nodes(op="call_function", target=OP))


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: waited(x) + 1, 1),
        (lambda x: waited(waited(x) + 1), 2),
        (lambda x: waited(x, "max"), 0),
        (lambda x: waited(x.t()), 0),
        (apart, 0),
        (read_before, 0),
    ],
)
def test_a_sum_and_its_wait_right_behind_it_are_replaced(function: Any, number: int) -> None:
    assert replaced(function, Always()) == number


def test_what_the_chooser_leaves_stays() -> None:
    assert replaced(lambda x: waited(x), Always("")) == 0


def test_the_op_has_the_value_and_the_line_of_the_sum() -> None:
    graph = graph_of(lambda x: waited(x))
    (wait,) = graph.find_nodes(op="call_function", target=ops.wait_tensor.default)
    wait.meta["stack_trace"] = "the user's line"
    expected = wait.meta["val"]
    ReplacingPass(OP, Always())(graph)
    (node,) = graph.find_nodes(op="call_function", target=OP)
    assert node.meta["val"] is expected and node.meta["stack_trace"] == "the user's line"
    assert node.args[1:] == ("64:one_shot", "0")


def test_its_identity_is_that_of_what_it_decides() -> None:
    one, same, other = (ReplacingPass(OP, Always(rows)).uuid() for rows in ("a", "a", "b"))
    assert one == same != other
