"""Graphs with ops in place of a sum in flight: their order, what is read until when, and which sums stay."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from tpcompile.by_size.in_flight import OPS, received_size
from tpcompile.by_size.pushed_sums import push
from tpcompile.torch_api.c10d import ops

START, PRODUCT, RECEIVE, RELEASE = OPS
PLACE_OF_AFTER = {START: 1, PRODUCT: 2, RECEIVE: 0, RELEASE: 1}
aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
"""As Inductor has it in its graphs."""


def graph_of(function: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> Graph:
    mode = FakeTensorMode()
    graph: Graph = make_fx(function)(mode.from_tensor(torch.ones(4, 8, dtype=dtype))).graph
    return graph


def pushed(function: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> Graph:
    graph = graph_of(function, dtype)
    push(graph, OPS, lambda x, group_name: group_name == "0")
    graph.lint()
    return graph


def calls(graph: Graph, op: Any) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=op))


def arguments(graph: Graph, op: Any, first: int) -> list[Any]:
    return [node.args[first:-1] for node in calls(graph, op)]


def in_turn(x: Tensor, ends: tuple[int, ...] = (0, 1), reduce_op: str = "sum") -> Tensor:
    """Two sums in flight that end in this order, and are read at the end."""
    pending = [ops.all_reduce(part, reduce_op, "0") for part in (x * 2, x * 3)]
    beside = x.sin()
    return torch.stack([ops.wait_tensor(pending[number]) for number in ends]) + beside


def five_at_a_time(x: Tensor) -> Tensor:
    pending = [ops.all_reduce(x * number, "sum", "0") for number in range(5)]
    beside = x.sin()
    return torch.stack([ops.wait_tensor(one) for one in pending]) + beside


def read_before(x: Tensor) -> Any:
    pending = ops.all_reduce(x, "sum", "0")
    return ops.wait_tensor(pending), pending


def with_nothing_beside(x: Tensor) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def test_each_op_is_behind_the_one_before() -> None:
    graph = pushed(lambda x: in_turn(in_turn(x).sum(0)))
    assert arguments(graph, START, 2) == [(0, 4, True), (1, 4, False), (2, 4, False), (3, 4, False)]
    assert arguments(graph, RECEIVE, 3) == [(0,), (1,), (2,), (3,)]
    assert len(calls(graph, RELEASE)) == 3 and not calls(graph, ops.all_reduce.default)
    made = [node for node in graph.nodes if node.target in OPS]
    for before, node in itertools.pairwise(made):
        assert before in node.args[PLACE_OF_AFTER[node.target]]


@pytest.mark.parametrize(
    ("multiply", "op"),
    [
        (lambda x: x @ x.t(), aten.mm.default),
        (lambda x: aten._addmm_activation(x[0, :4], x, x.t(), use_gelu=True), aten._addmm_activation.default),
    ],
    ids=["mm", "with an epilogue"],
)
def test_a_sum_ends_behind_the_last_product_beside_it(multiply: Callable[[Tensor], Tensor], op: Any) -> None:
    def beside_a_product(x: Tensor) -> Tensor:
        pending = ops.all_reduce(x, "sum", "0")
        product = multiply(x)
        return ops.wait_tensor(pending).sum() + product

    (receive,) = calls(pushed(beside_a_product), RECEIVE)
    assert [node.target for node in receive.args[0]] == [START, op]


def product_and_sum(x: Tensor, weight: Tensor) -> Tensor:
    return ops.wait_tensor(ops.all_reduce((x @ weight).view(2, 2, 8), "sum", "0"))


def test_a_product_with_nothing_beside_its_sum_and_its_start_are_one() -> None:
    graph = pushed(lambda x: product_and_sum(product_and_sum(x, x.t() @ x).view(4, 8), x.t() @ x))
    weights = calls(graph, aten.mm.default)
    first, second = calls(graph, PRODUCT)
    assert (first.args[1:2], second.args[1:2]) == ((weights[0],), (weights[1],)) and len(weights) == 2
    assert [node.args[3:] for node in (first, second)] == [(0, 2, True, "0"), (1, 2, False, "0")]
    received = calls(graph, RECEIVE)
    assert [node.args[1:4] for node in received] == [(32, torch.float32, 0), (32, torch.float32, 1)]
    assert not calls(graph, START) and not calls(graph, ops.all_reduce.default)
    (total, _) = calls(graph, aten.add.Tensor)
    assert total.args[0].args[0] is first and total.meta["val"].shape == (2, 2, 8)
    made = [node for node in graph.nodes if node.target in OPS]
    for before, node in itertools.pairwise(made):
        assert node.args[PLACE_OF_AFTER[node.target]] == [before]


def test_a_product_that_is_read_twice_stays_with_its_sum() -> None:
    def function(x: Tensor) -> Any:
        product = x @ x.t()
        return ops.wait_tensor(ops.all_reduce(product, "sum", "0")), product

    graph = pushed(function)
    assert calls(graph, ops.all_reduce.default) and not calls(graph, PRODUCT)


def backward(x: Tensor, *, weight_first: bool) -> Any:
    """The gradients of an input and of a weight; the sum of the first is asked for behind both."""
    grad, weight = x.sin(), x.t() @ x
    of_weight = x.t() @ grad if weight_first else None
    of_input = grad @ weight.t()
    of_weight = x.t() @ grad if of_weight is None else of_weight
    return ops.wait_tensor(ops.all_reduce(of_input.view(2, 2, 8), "sum", "0")), of_weight


@pytest.mark.parametrize("weight_first", [False, True])
def test_a_sum_starts_behind_its_product_with_the_product_of_the_weights_gradient_beside_it(weight_first: bool) -> None:
    graph = pushed(partial(backward, weight_first=weight_first))
    (start,), (receive,) = calls(graph, START), calls(graph, RECEIVE)
    _, of_input, of_weight = calls(graph, aten.mm.default)
    assert start.prev.args[0] is of_input and of_weight.meta["val"].shape == (8, 8)
    assert receive.args[0] == [start, of_weight]


def summed_late(x: Tensor) -> Any:
    """The second product is beside the first sum, and its own sum starts behind a later one."""
    first = ops.all_reduce(x.sin(), "sum", "0")
    product = x @ x.t()
    first = ops.wait_tensor(first) + 1
    second = ops.wait_tensor(ops.all_reduce(first @ x.t(), "sum", "0"))
    return ops.wait_tensor(ops.all_reduce(product, "sum", "0")), second


def test_a_product_before_the_start_of_an_earlier_sum_is_not_sent() -> None:
    """It would be sent behind that start, and that would be behind this product."""
    graph = pushed(summed_late)
    (start,), (product,), (receive, _) = calls(graph, START), calls(graph, PRODUCT), calls(graph, RECEIVE)
    (beside,) = calls(graph, aten.mm.default)
    assert receive.args[0] == [start, beside] and beside < product
    (late,) = calls(graph, ops.all_reduce.default)
    assert late.args[0] is beside


def of_one_source(x: Tensor) -> Any:
    source, weight = x.sin(), x.t() @ x
    first = ops.wait_tensor(ops.all_reduce(source @ weight, "sum", "0"))
    return first, ops.wait_tensor(ops.all_reduce(source @ weight.t(), "sum", "0"))


def test_starts_of_products_of_one_source_stay_in_their_order() -> None:
    """In the other order they would end in a different one, and stay as they are."""
    graph = pushed(of_one_source)
    _, one, other = calls(graph, aten.mm.default) + calls(graph, PRODUCT)
    assert one.args[1].target is aten.mm.default and other.args[1].target is aten.t.default
    assert [node.target for node in graph.nodes if node.target in OPS] == [START, PRODUCT, RECEIVE, RELEASE, RECEIVE]
    assert not calls(graph, ops.all_reduce.default)


def test_a_view_whose_size_is_computed_behind_the_source_is_not_put_before_it() -> None:
    """As in a graph of sizes that are not known, in which the sum has one that is."""
    graph = graph_of(lambda x: product_and_sum(x.sin().view(4, 8), x.t() @ x))
    view = calls(graph, aten.view.default)[0]
    with graph.inserting_before(view):
        size = graph.call_function(operator.mul, (2, 4))
    view.args = (view.args[0], [4, size])
    push(graph, OPS, lambda *_: True)
    graph.lint()
    assert len(calls(graph, PRODUCT)) == 1


def in_two_groups(x: Tensor) -> Tensor:
    """Sums of both, one after the other; each is read, through an addition, before the next one starts."""
    for group in ("0", "1", "0", "1", "0", "1"):
        x = ops.wait_tensor(ops.all_reduce(x.t() @ x.cos() @ x.t(), "sum", group)).t() @ x.sin() + 1
    return x


def test_each_release_is_behind_what_it_names_in_graphs_of_two_groups() -> None:
    graph = graph_of(lambda x: in_two_groups(x.t() @ x))
    push(graph, OPS, lambda *_: True)
    graph.lint()
    assert len(calls(graph, PRODUCT)) == 6 and len(calls(graph, RELEASE)) == 4
    assert all(release.prev is release.args[0] for release in calls(graph, RELEASE))


def test_each_op_is_reached_in_one_way() -> None:
    """torch 2.11 writes out what a new op is computed from, and that from what; two ways are 2^n after n ops."""
    graph = pushed(lambda x: in_turn(in_turn(product_and_sum(x, x.t() @ x).view(4, 8)).sum(0)))
    made = [node for node in graph.nodes if node.target in OPS]
    assert {node.target for node in made} == set(OPS) and num_ways(made[-1], made[0]) == 1
    receive = next(node for node in made if node.target is RECEIVE)
    receive.args = ([*receive.args[0], made[0]], *receive.args[1:])
    assert num_ways(made[-1], made[0]) == 2


def num_ways(node: Node, first: Node) -> int:
    if node is first:
        return 1
    return sum(num_ways(one, first) for one in node.args[PLACE_OF_AFTER[node.target]] if one.target in OPS)


def one_sum(behind: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Any]:
    """A sum with work beside it, and what is made of both; then one more, behind which nothing is released."""

    def function(x: Tensor) -> Any:
        pending = ops.all_reduce(x, "sum", "0")
        beside = x.sin()
        found = behind(ops.wait_tensor(pending), beside)
        last = ops.all_reduce(x * 3, "sum", "0")
        return found, beside.cos(), ops.wait_tensor(last)

    return function


def norm(x: Tensor) -> Tensor:
    return x * x.float().square().mean(-1, keepdim=True).rsqrt().to(x.dtype)


@pytest.mark.parametrize(
    ("behind", "read", "dtype"),
    [
        (lambda y, x: norm((y * x).view(8, 4) + 1), "add", "float32"),
        (lambda y, x: norm(cast(cast(y, torch.float32) * x + 1, torch.bfloat16)), "convert", "bfloat16"),
        (lambda y, x: cast(y + x, torch.float64).sum(), "add", "bfloat16"),
        (lambda y, x: (y.relu(), y + x), "add", "float32"),
        (lambda y, x: y @ x.t(), "add", "float32"),
        (lambda y, x: y[:, :1] * x.sum(), "add", "float32"),
        (lambda y, x: y.exp() + x.new_ones(3, 1, 1), "exp", "float32"),
    ],
    ids=["residual", "through float32", "not the wider", "two readers", "product", "a part of it", "broadcast"],
)
def test_a_release_is_behind_what_alone_reads_the_sum(behind: Any, read: str, dtype: str) -> None:
    """The smallest of the results through which alone it is read; where two read it, the sum itself."""
    graph = pushed(one_sum(behind), getattr(torch, dtype))
    (receive, _), (release,) = calls(graph, RECEIVE), calls(graph, RELEASE)
    found = release.args[0]
    assert found.name.startswith(read) and release.prev is found and release.args[1] == [receive]
    assert found.meta["val"].dtype == getattr(torch, dtype)
    behind_it = set(itertools.takewhile(lambda node: node is not release, reversed(graph.nodes)))
    assert not any(reads(node, receive, found) for node in behind_it)


def reads(node: Node, received: Node, through: Node) -> bool:
    """Whether a node is computed from what was received in a different way than through that node."""
    if node is through:
        return False
    return node is received or any(
        reads(one, received, through) for one in node.all_input_nodes if one.target not in OPS or one is received
    )


def test_the_walk_over_inputs_sees_a_reader_past_the_release() -> None:
    """The control of the test above."""
    graph = pushed(one_sum(lambda y, x: (y.relu(), y + x)))
    (receive, _), (release,), (relu,) = (calls(graph, op) for op in (RECEIVE, RELEASE, aten.relu.default))
    other = calls(graph, aten.add.Tensor)[1]
    assert reads(relu, receive, other) and not reads(relu, receive, release.args[0])


def test_what_is_received_has_a_size_of_its_own_and_the_sum_the_meta_of_the_wait() -> None:
    """Inductor takes the memory of a result for one of 95 % of its size, and the peer would write there."""
    graph = graph_of(one_sum(lambda y, x: norm(y + x)))
    wait, _ = calls(graph, ops.wait_tensor.default)
    wait.meta["stack_trace"], value = "the user's line", wait.meta["val"]
    push(graph, OPS, lambda *_: True)
    receive, part = calls(graph, RECEIVE)[0], calls(graph, aten.view.default)[0]
    (total,) = part.users
    assert receive.meta["val"].shape == (received_size(value.numel()),) == (44,) and part.meta["val"].shape == (4, 8)
    assert value.numel() < 0.95 * received_size(value.numel())
    assert total.meta["val"] is value
    assert total.meta["stack_trace"] == receive.meta["stack_trace"] == "the user's line"


def read_in_a_different_order(x: Tensor) -> Tensor:
    """The first sum is read last: the releases would not be in the order of the starts."""
    pending = [ops.all_reduce(part, "sum", "0") for part in (x * 2, x * 3)]
    beside = x.sin()
    first, second = (ops.wait_tensor(one) for one in pending)
    late = (second + 1).sum() + beside
    return (first + 1).sum() + late


def read_behind_the_next_start(x: Tensor) -> Any:
    pending = ops.all_reduce(x, "sum", "0")
    beside = x.sin()
    first = ops.wait_tensor(pending)
    pending = ops.all_reduce(x.cos(), "sum", "0")
    return first.exp(), beside, ops.wait_tensor(pending)


def test_a_sum_takes_a_slot_until_it_is_read() -> None:
    graph = pushed(read_behind_the_next_start)
    made = [node.target for node in graph.nodes if node.target in OPS]
    assert made == [START, RECEIVE, START, RELEASE, RECEIVE]
    assert arguments(graph, START, 2) == [(0, 4, True), (1, 4, False)]


def read_together(x: Tensor) -> Tensor:
    one, other = (ops.all_reduce(part, "sum", "0") for part in (x * 2, x * 3))
    beside = x.sin()
    both = (ops.wait_tensor(one) + ops.wait_tensor(other)) * beside
    last = ops.all_reduce(beside, "sum", "0")
    return both.sum() * x.cos() + ops.wait_tensor(last)


def test_sums_that_one_result_reads_are_released_in_their_order() -> None:
    graph = pushed(read_together)
    first, second = calls(graph, RELEASE)
    assert first.args[0] is second.args[0] is first.prev
    assert second.prev is first and second.args[1] == [first]


def test_sums_that_are_read_in_a_different_order_are_written_where_they_end() -> None:
    graph = pushed(read_in_a_different_order)
    (release,), part = calls(graph, RELEASE), calls(graph, aten.view.default)[0]
    assert list(part.users) == [release.args[0]]


@pytest.mark.parametrize(
    ("function", "group"),
    [
        (lambda x: in_turn(x, (1, 0)), "0"),
        (five_at_a_time, "0"),
        (lambda x: in_turn(x), "1"),
        (read_before, "0"),
        (with_nothing_beside, "0"),
        (lambda x: in_turn(x.t()), "0"),
        (partial(in_turn, reduce_op="max"), "0"),
        (partial(in_turn, reduce_op="avg"), "0"),
    ],
    ids=["other order", "five", "other group", "read before", "nothing beside", "not contiguous", "max", "avg"],
)
def test_sums_that_end_in_a_different_order_are_too_many_or_are_not_what_is_pushed_stay(
    function: Any, group: str
) -> None:
    graph = graph_of(function)
    push(graph, OPS, lambda x, group_name: group_name == group)
    assert not calls(graph, START) and calls(graph, ops.all_reduce.default)
