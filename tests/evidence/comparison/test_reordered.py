"""The same ops or collectives in different orders: no branch of one rank, and never an op that only one rank has."""

from __future__ import annotations

import pytest

from tests.evidence.samples import F32, call, compiled, graph, guard, only, reduce
from tpcompile.evidence.groups.by_group import Items
from tpcompile.evidence.layers.graph import graph_items
from tpcompile.evidence.layers.permutations import reordered_collectives, reordered_ops
from tpcompile.evidence.records import CompileRecord, Divergence, Graph, Node
from tpcompile.evidence.records.causes import Cause

A_SET = guard(source="G['KEYS']", says="== {'a', 'b'}")


def on_values(*operands: str, **fields: object) -> CompileRecord:
    """Reduces the tanh (%1) and the relu (%2) of the input, in the given order."""
    values = call("torch.tanh", "%0", at=3), call("torch.relu", "%0", at=4)
    reduced = [reduce(operand, at=5 + number) for number, operand in enumerate(operands)]
    return compiled(*values, *reduced, call("mul", "%3", "%4"), **fields)


def inside(*names: str) -> CompileRecord:
    """The same through an autograd function: each call has subgraphs of its own, numbered in their order."""
    own: dict[str, int] = {"a": 1, "b": 2}
    nodes: list[Node] = [call("torch.tanh", "%0"), call("torch.relu", "%0")]
    inner: list[Node] = []
    for number, name in enumerate(names):
        at = len(nodes) + 1
        nodes += [Node(scope="", op="get_attr", target=f"self.{part}_body_{number}") for part in ("fwd", "bwd")]
        apply = "torch.ops.higher_order.autograd_function_apply"
        nodes.append(call(apply, f"%{at}", f"%{at + 1}", f"%{own[name]}", at=5 + number))
        for part in (2 * number, 2 * number + 1):
            inner.append(Node(scope=f"{part}/", op="placeholder", target="input 0", value=F32))
            reduced = reduce("%0") if part % 2 == 0 else call("clone", "%0")
            inner.append(reduced.model_copy(update={"scope": f"{part}/"}))
    outer = graph(*nodes)
    return compiled(graphs=(Graph(kind="dynamo", nodes=(*outer.nodes, *inner)),))


def targets(found: Divergence) -> list[str | None]:
    """What each group of ranks calls at the difference."""
    return [group.item and group.item.fields["target"] for group in found.groups]


def nodes(*operands: str) -> Items:
    """The programs of two ranks, the second with the operands in reverse order."""
    programs = (on_values(*operands), on_values(*reversed(operands)))
    return Items(tuple(graph_items(made.graphs[0])) for made in programs)


def test_the_permutation_has_what_is_permuted_and_the_first_place() -> None:
    moved = reordered_collectives(nodes("%1", "%2"))
    assert moved is not None and (moved.of, moved.shown) == ("collectives", "tanh(x) / relu(x)")
    assert [item and item.line.line for item in moved.row] == [5, 5]
    reads = reordered_ops(nodes("%1", "%2"))
    assert reads is not None and (reads.of, [item.about for item in reads.row.present]) == ("reads", ["%3", "%3"])
    assert reordered_collectives(nodes("%1", "%1")) is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_of_equal_sizes_that_one_rank_swaps_differ_in_their_order(ranks: int) -> None:
    found = only(*[on_values("%1", "%2")] * (ranks - 1), on_values("%2", "%1"))
    assert found.cause == Cause.ORDER_FORWARD
    assert "tanh(x) / relu(x)" in found.title


def test_so_do_calls_of_an_autograd_function_that_issues_them() -> None:
    found = only(inside("a", "b"), inside("b", "a"))
    assert (found.cause, found.title.partition(": ")[2]) == (Cause.ORDER_FORWARD, "tanh(x) / relu(x)")


def test_a_collective_on_a_value_that_no_other_rank_reduces_is_no_order() -> None:
    found = only(on_values("%1", "%2"), on_values("%1", "%1"))
    assert found.cause == Cause.RANK_BRANCH
    assert "relu(x) / tanh(x)" in found.title


def test_a_set_whose_elements_choose_what_the_same_op_reads_is_iterated_in_a_different_order() -> None:
    found = only(on_values("%1", "%2", guards=(A_SET,)), on_values("%2", "%1", guards=(A_SET,)))
    assert found.cause == Cause.SET_ORDER
    assert "tanh(x) / relu(x)" in found.title
    assert "sorted(...)" in found.advice


def test_a_set_is_no_reason_for_a_value_that_only_one_rank_reads() -> None:
    found = only(on_values("%1", "%2", guards=(A_SET,)), on_values("%1", "%1", guards=(A_SET,)))
    assert found.cause == Cause.RANK_BRANCH


def test_an_op_that_comes_later_on_a_rank_is_not_said_to_be_missing_there() -> None:
    def runs(*names: str) -> CompileRecord:
        return compiled(*(call(f"torch.{name}", "%0") for name in names))

    found = only(runs("exp", "cos", "sin"), runs("cos", "sin", "exp"))
    assert targets(found) == ["torch.exp", "torch.cos"]
    extra = only(runs("exp", "cos", "sin"), runs("cos", "sin", "exp", "sqrt"))
    assert targets(extra) == [None, "torch.sqrt"]


def test_an_op_that_only_one_rank_has_is_said_to_be_missing_on_the_others() -> None:
    healthy, extra = compiled(), compiled(call("torch.exp", "%0"), call("mul", "%0", "2"), reduce("%2"))
    assert targets(only(healthy, extra)) == [None, "torch.exp"]


def test_a_headline_is_never_made_of_numbers_of_nodes_alone() -> None:
    def reads(operand: str) -> CompileRecord:
        weight = Node(scope="", op="placeholder", target="L_self_modules_head_parameters_weight_", value=F32)
        x = Node(scope="", op="placeholder", target="L_x_", value=F32)
        apply = call("torch.ops.higher_order.wrap_with_a_long_name_of_its_own", operand, "x" * 80)
        return compiled(graphs=(Graph(kind="dynamo", nodes=(weight, x, apply)),))

    found = only(reads("%0"), reads("%1"))
    assert found.title.startswith("wrap_with_a_long_name_of_its_own ") and "self.head.weight / x" in found.title
