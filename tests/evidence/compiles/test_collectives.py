"""Collectives out of graphs: order, arguments, groups, and what happens to their results."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed._functional_collectives as funcol

from tpcompile.evidence.compiles.collectives import blamed_line, collectives_of
from tpcompile.evidence.records import Collective, Graph, Node, UserLine
from tpcompile.evidence.text.fx import parse_graph
from tpcompile.evidence.text.lines import is_library
from tpcompile.evidence.text.normalise import GroupRoles

ROLES = {"0": "tp", "1": "dp"}
FUNCTIONAL = "torch.ops._c10d_functional"


def graph(body: str, *, kind: str = "forward") -> Graph:
    """A graph of one input `x` and the given statements."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    text = f'class G(torch.nn.Module):\n    def forward(self, x: "bf16[1, 16, 64][1024, 64, 1]cuda:3"):\n{lines}\n'
    return parse_graph(text, kind=kind, roles=GroupRoles(ROLES))


def one(body: str) -> Collective:
    """The only collective of a graph."""
    (found,) = collectives_of([graph(body)])
    return found


REDUCE = f"""
a = {FUNCTIONAL}.all_reduce.default(x, 'sum', '0')
b = {FUNCTIONAL}.wait_tensor.default(a);  a = None
return (b,)
"""


def test_a_collective_has_its_operand_reduce_op_and_group_role() -> None:
    found = one(REDUCE)
    assert (found.op, found.reduce_op, found.dtype, found.shape, found.group) == (
        "all_reduce", "sum", "bf16", "[1, 16, 64]", "tp",
    )  # fmt: skip
    assert found.waited and found.used


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (f"{FUNCTIONAL}.all_gather_into_tensor.default(x, 2, '1')", "all_gather_into_tensor"),
        (f"{FUNCTIONAL}.reduce_scatter_tensor.default(x, 'avg', 2, '1')", "reduce_scatter_tensor"),
        (f"{FUNCTIONAL}.all_to_all_single.default(x, [1], [1], '1')", "all_to_all_single"),
        (f"{FUNCTIONAL}.broadcast.default(x, 0, '1')", "broadcast"),
    ],
)
def test_every_kind_of_collective_is_seen_with_its_group(call: str, op: str) -> None:
    found = one(f"a = {call}\nb = {FUNCTIONAL}.wait_tensor.default(a)\nreturn (b,)")
    assert (found.op, found.group) == (op, "dp")


def test_a_broadcast_has_the_rank_that_it_sends_from_and_a_reduce_has_none() -> None:
    assert one(f"    b = {FUNCTIONAL}.broadcast.default(x, 1, '0')").src == "1"
    assert one(REDUCE).src == ""


def test_a_collective_without_a_wait_is_marked() -> None:
    assert not one(f"a = {FUNCTIONAL}.all_reduce.default(x, 'sum', '0')\nreturn (a,)").waited


def test_a_collective_whose_result_is_dropped_is_marked() -> None:
    dropped = REDUCE.replace("return (b,)", "return (x,)")
    assert one(dropped).waited and not one(dropped).used


def test_backward_comes_after_forward_whatever_the_order_of_events() -> None:
    found = collectives_of([graph(REDUCE, kind="backward"), graph(REDUCE.replace("'0'", "'1'"))])
    assert [(c.phase, c.group) for c in found] == [("forward", "dp"), ("backward", "tp")]


def test_the_lowered_graphs_win_over_the_dynamo_graph() -> None:
    dynamo = graph(REDUCE + "", kind="dynamo")
    assert len(collectives_of([dynamo, graph(REDUCE)])) == 1
    assert len(collectives_of([dynamo])) == 1


def test_an_in_place_reduce_counts_as_waited_for() -> None:
    found = one("torch.distributed.all_reduce(x, group = '0')\nreturn (x,)")
    assert (found.op, found.waited, found.used) == ("all_reduce", True, True)


def test_a_library_line_is_replaced_by_the_nearest_user_line_before_it() -> None:
    mine = UserLine(file="/app/model.py", line=3)
    library = UserLine(file="/venv/lib/site-packages/torch/distributed/_functional_collectives.py", line=9)
    later = UserLine(file="/app/model.py", line=8)
    nodes = [Node(scope="", op="call", target="f", line=line) for line in (mine, library, later)]
    assert blamed_line(nodes, 1) == mine
    assert blamed_line(nodes[1:], 0) == later
    assert blamed_line(nodes[1:2], 0) == library


SOURCE, START = inspect.getsourcelines(funcol.all_reduce)
CUT = ["distributed/_functional_collectives.py", "ckages/torch/distributed/_functional_collectives.py"]
"""How torch cuts the path of its own file, by the length of what stands before it."""


@pytest.mark.parametrize("file", CUT)
def test_a_cut_path_is_torchs_when_its_code_stands_there(file: str) -> None:
    line = UserLine(file=file, line=START, function="all_reduce", code=SOURCE[0].strip())
    assert is_library(line)


@pytest.mark.parametrize("file", CUT)
@pytest.mark.parametrize(
    ("line", "code"), [(START, "y = my_all_reduce(x)"), (START + 1, SOURCE[0].strip()), (START, "")],
    ids=["other code", "other line", "no code"],
)  # fmt: skip
def test_a_users_file_that_is_called_like_one_of_torch_is_the_users(file: str, line: int, code: str) -> None:
    assert not is_library(UserLine(file=file, line=line, function="all_reduce", code=code))


@pytest.mark.parametrize(
    ("file", "is_ours"),
    [
        ("/venv/lib/python3.11/site-packages/torch/nn/functional.py", True),
        ("/usr/lib/python3/dist-packages/torch/nn/functional.py", True),
        ("/src/tpcompile/collectives/api.py", True),
        ("/src/tpcompile/nn/block.py", False),
        ("/home/me/torch/train.py", False),
    ],
)
def test_a_whole_path_shows_whose_file_it_is(file: str, is_ours: bool) -> None:
    assert is_library(UserLine(file=file, line=1)) == is_ours
