"""Drawn graphs with sums of two groups: with the ops in place of them, two ranks compute what they did, in time."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from tests.by_size.on_both import inputs, run_on_both
from tpcompile.by_size.in_flight import OPS
from tpcompile.by_size.pushed_sums import push
from tpcompile.torch_api.c10d import ops

START, PRODUCT, RECEIVE, RELEASE = OPS


class Event(NamedTuple):
    """An op of ours: of which message of its group it is, counted from 0."""

    node: Node
    op: Any
    message: int


def program(seed: int) -> Callable[..., list[Tensor]]:
    """Products and pointwise ops of 8 x 8 tensors, and sums of both, some of which start or end late."""

    def run(*inputs: Tensor) -> list[Tensor]:
        draw, known, pending = random.Random(seed), list(inputs), []
        early = inputs[0] @ inputs[1]
        groups = draw.choice(("0", "01"))
        for _ in range(draw.randint(6, 24)):
            one, other = (draw.choice(known[-6:]) for _ in range(2))
            kind = draw.choice(("product", "pointwise", "sum", "sum of a product", "sum of a product", "end"))
            if kind == "product":
                known.append(draw.choice((one, one.t())) @ draw.choice((other, other.t())))
            elif kind == "pointwise":
                known.append(draw.choice((one.sin(), one + other, one.view(64).view(8, 8) + 1, one.softmax(-1))))
            elif kind == "end" and pending:
                known.append(ops.wait_tensor(pending.pop(0)).view(8, 8))
            elif kind.startswith("sum"):
                x = one.contiguous() if kind == "sum" else draw.choice((one, one.t())) @ other
                if kind != "sum" and draw.random() < 0.2:
                    x, early = early, x
                started = ops.all_reduce(draw.choice((x, x.view(2, 4, 8))), "sum", draw.choice(groups))
                if draw.random() < 0.3:
                    known.append(one.t() @ other)
                if draw.random() < 0.7:
                    known.append(ops.wait_tensor(started).view(8, 8))
                else:
                    pending.append(started)
        return [*known[3:], *(ops.wait_tensor(one) for one in pending)][-4:]

    return run


def drawn(seed: int) -> Graph:
    mode = FakeTensorMode()
    graph: Graph = make_fx(program(seed))(*(mode.from_tensor(torch.ones(8, 8)) for _ in range(3))).graph
    graph.eliminate_dead_code()
    return graph


def events(graph: Graph) -> dict[str, list[Event]]:
    """Of each group, in order."""
    found: dict[str, list[Event]] = defaultdict(list)
    group_of: dict[Node, str] = {}
    started: dict[tuple[str, int], int] = {}
    for node in graph.nodes:
        if node.target in OPS:
            group = group_of[node] = group_of[node.args[1][0]] if node.target is RELEASE else node.args[-1]
            message = sum(one.op is node.target for one in found[group])
            if node.target in (START, PRODUCT):
                message = sum(one.op in (START, PRODUCT) for one in found[group])
                started[group, node.args[-4]] = message
            elif node.target is RECEIVE:
                message = started[group, node.args[3]]
            found[group].append(Event(node, node.target, message))
    return found


def too_early(of_group: list[Event]) -> list[Node]:
    """The starts that write a slot which the other rank may still read.

    That it has released what was there is known once a message has come that it started after that.
    """
    place = {("start" if one.op in (START, PRODUCT) else one.op, one.message): i for i, one in enumerate(of_group)}
    starts = [one.node for one in of_group if one.op in (START, PRODUCT)]
    found = []
    for number, node in enumerate(starts):
        earlier = [i for i in range(number) if starts[i].args[-4] == node.args[-4]]
        between = range(earlier[-1] + 1, number) if earlier else ()
        is_known = any(
            place[RELEASE, earlier[-1]] < place["start", i] and place[RECEIVE, i] < place["start", number]
            for i in between
        )
        if earlier and not is_known:
            found.append(node)
    return found


def late_readers(graph: Graph, of_group: list[Event]) -> list[Node]:
    """Nodes behind a release that are computed from what it released in a different way than through what it names."""
    found = []
    received = {one.message: one.node for one in of_group if one.op is RECEIVE}
    for release, _, message in (one for one in of_group if one.op is RELEASE):
        readers = {received[message]}
        for node in graph.nodes:
            if node is not release.args[0] and node.target not in OPS and readers & set(node.all_input_nodes):
                readers.add(node)
        found += [node for node in readers if release < node]
    return found


def unordered(of_group: list[Event]) -> list[Node]:
    """Ops that are not computed from the one before."""
    return [after.node for one, after in itertools.pairwise(of_group) if one.node not in after.node.all_input_nodes]


class Drawn(NamedTuple):
    """A graph with ops in place of sums, and what it computed before, of each rank."""

    seed: int
    graph: Graph
    expected: list[list[Tensor]]


def pushed(seeds: range) -> list[Drawn]:
    """Those that have any."""
    found = []
    for seed in seeds:
        graph = drawn(seed)
        expected = run_on_both(graph, inputs(seed))
        push(graph, OPS, lambda *_: True)
        if any(node.target in OPS for node in graph.nodes):
            found.append(Drawn(seed, graph, expected))
    return found


@pytest.fixture(scope="module")
def all_drawn() -> list[Drawn]:
    return pushed(range(100))


@pytest.fixture(scope="module")
def graphs(all_drawn: list[Drawn]) -> list[Graph]:
    return [one.graph for one in all_drawn]


def test_the_drawn_graphs_have_every_op_and_two_groups(graphs: list[Graph]) -> None:
    for op in OPS:
        assert sum(bool(graph.find_nodes(op="call_function", target=op)) for graph in graphs) > 10
    assert sum(len(events(graph)) == 2 for graph in graphs) > 5


def test_every_node_is_behind_its_inputs(graphs: list[Graph]) -> None:
    for graph in graphs:
        graph.lint()
        assert [node.op for node in graph.nodes][:3] == ["placeholder"] * 3
        # A node put beside one that was erased is in one of the two directions only.
        assert list(graph.nodes) == [*reversed([*reversed(graph.nodes)])]


def test_values_are_those_of_the_sums(all_drawn: list[Drawn]) -> None:
    for seed, graph, expected in all_drawn:
        for one, other in zip(expected, run_on_both(graph, inputs(seed)), strict=True):
            assert all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(one, other, strict=True)), seed


def test_no_slot_is_written_and_nothing_is_read_at_the_wrong_time(graphs: list[Graph]) -> None:
    for graph in graphs:
        for of_group in events(graph).values():
            assert not unordered(of_group) and not too_early(of_group) and not late_readers(graph, of_group)


def test_half_as_many_slots_are_seen() -> None:
    """The control of that: a message that the other rank may still read is overwritten."""
    of_groups = [of_group for one in pushed(range(30)) for of_group in events(one.graph).values()]
    for of_group in of_groups:
        for node, op, message in of_group:
            if op in (START, PRODUCT):
                num_slots = node.args[-3]
                node.update_arg(len(node.args) - 4, message % (num_slots // 2))
    assert sum(bool(too_early(of_group)) for of_group in of_groups) > 3


def test_a_release_of_something_else_and_one_behind_nothing_are_seen() -> None:
    """The control of the other two."""
    graph = next(one.graph for one in pushed(range(9)) if one.graph.find_nodes(op="call_function", target=RELEASE))
    of_group = next(one for one in events(graph).values() if len(one) > 2)
    release = next(one.node for one in of_group if one.op is RELEASE)
    assert not late_readers(graph, of_group) and not unordered(of_group)
    release.args = (graph.find_nodes(op="placeholder")[0], [])
    assert late_readers(graph, of_group) and unordered(of_group)
