"""A launch of a Triton kernel is compared by its name and constants where every rank has them, never by its numbers."""

from __future__ import annotations

from tests.evidence.samples import between, compiled, graph, line, lowered, only
from tpcompile.evidence.records import Layer, Node

NAMED = {"kernel": "'app.norm'", "constants": "'SIZE=4'"}


def launch(**kwargs: str) -> Node:
    target = "torch.ops.higher_order.triton_kernel_wrapper_mutation"
    return Node(
        scope="", op="call", target=target, kwargs=tuple({**kwargs, "grid": "[(8, 1, 1)]"}.items()), line=line(5)
    )


def test_numbers_of_a_launch_are_no_difference() -> None:
    first, second = ({"kernel_idx": str(i), "constant_args_idx": str(i)} for i in (0, 7))
    assert between(compiled(graphs=(graph(launch(**first)),)), compiled(graphs=(graph(launch(**second)),))) == ()


def test_a_rank_that_loaded_its_lowered_graph_has_numbers_where_others_have_names() -> None:
    loaded = {"kernel_idx": "3", "constant_args_idx": "1"}
    assert between(lowered(launch(**NAMED)), lowered(launch(**loaded))) == ()


def test_a_different_kernel_or_constant_in_the_program_is_a_difference() -> None:
    for changed in ({"kernel": "'app.other'"}, {"constants": "'SIZE=8'"}):
        one, other = (compiled(graphs=(graph(launch(**{**NAMED, **more})),)) for more in ({}, changed))
        found = only(one, other)
        assert found.layer == Layer.GRAPH and found.groups[0].item is not None
        assert found.groups[0].item.line == line(5)
