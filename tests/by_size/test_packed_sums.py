"""Small sums that only leave a graph: which are packed, what comes out, and the names of torch that it needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.by_size.on_both import inputs, run_on_both
from tests.by_size.rows import ON_CPU
from tpcompile.by_size import packed_sums, pushed_sums, setting
from tpcompile.by_size.op import OP
from tpcompile.by_size.packed_sums import pack
from tpcompile.by_size.setting import ReplacingPass, Sums
from tpcompile.torch_api.c10d import ops


def total(x: Tensor, group: str = "0", op: str = "sum") -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x, op, group))


def graph_of(program: Callable[..., Sequence[Tensor]], dtype: torch.dtype = torch.float32) -> Graph:
    mode = FakeTensorMode()
    graph: Graph = make_fx(program)(*(mode.from_tensor(torch.ones(8, 8, dtype=dtype)) for _ in range(3))).graph
    graph.eliminate_dead_code()
    return graph


def sums_of(graph: Graph) -> list[list[int]]:
    """Shapes of what is summed, in order."""
    starts = graph.find_nodes(op="call_function", target=ops.all_reduce.default)
    return [list(one.args[0].meta["val"].shape) for one in starts]


def packed(program: Callable[..., Sequence[Tensor]]) -> list[list[int]]:
    graph = graph_of(program)
    pack(graph)
    graph.lint()
    return sums_of(graph)


def gradients(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
    """Two weights, a cast of one; work that reads neither is between, and starts and waits are apart."""
    first = ops.all_reduce(x.sum(0), "sum", "0")
    work = (x @ y).relu()
    of_weight = ops.wait_tensor(first)
    return [of_weight.to(torch.float64).view(2, 4), total(y[:2] + 1), work @ z]


def test_sums_that_only_leave_become_one() -> None:
    assert packed(gradients) == [[8 + 16 + 8]]  # whole vectors


@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        pytest.param(lambda x, y, z: [total(x) + y, total(y), total(z)], [[8, 8], [128]], id="one is read"),
        pytest.param(lambda x, y, z: [total(x), total(y, "1"), total(z, "1")], [[8, 8], [128]], id="a group each"),
        pytest.param(lambda x, y, z: [total(x), total(y, op="max")], [[8, 8], [8, 8]], id="a maximum"),
        pytest.param(lambda x, y, z: [total(x), total(y.double())], [[8, 8], [8, 8]], id="a dtype each"),
        pytest.param(lambda x, y, z: [total(x), total(y.t())], [[8, 8], [8, 8]], id="not contiguous"),
        pytest.param(lambda x, y, z: [total(total(x)), total(y)], [[8, 8], [128]], id="a sum of a sum"),
        pytest.param(lambda x, y, z: [total(x), y], [[8, 8]], id="one"),
        pytest.param(lambda x, y, z: [total(x), total(y.to("meta"))], [[8, 8], [8, 8]], id="a device each"),
        pytest.param(
            lambda x, y, z: [torch.rand_like(total(x)), y.bernoulli(), total(z)], [[8, 8], [8, 8]], id="drawn"
        ),
        pytest.param(lambda x, y, z: [total(x).mul_(2), total(z)], [[8, 8], [8, 8]], id="in place"),
    ],
)
def test_others_stay(program: Any, shapes: list[list[int]]) -> None:
    assert packed(program) == shapes


def test_large_ones_stay_and_no_pack_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_sums, "_MOST_BYTES", 4 * 63)
    assert packed(lambda x, y, z: [total(x), total(y), total(z[:3]), total(z[4:])]) == [[8, 8], [8, 8], [64]]
    monkeypatch.setattr(packed_sums, "_MOST_BYTES", 4 * 64)
    assert packed(lambda x, y, z: [total(x), total(y[:4]), total(z[:4]), total(z[4:])]) == [[8, 8], [64], [4, 8]]


def test_sizes_that_are_not_known_stay() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.ones(6, 8), symbolic_context=context)
    graph = make_fx(lambda x: [total(x), total(x * 2)])(x).graph
    pack(graph)
    assert len(sums_of(graph)) == 2


def test_a_long_chain_behind_a_sum_is_walked() -> None:
    graph = graph_of(lambda x, y, z: [total(x), total(y)])
    output = graph.output_node()
    (first, second), number = output.args[0], 3000
    with graph.inserting_before(output):
        for _ in range(number):
            value = first.meta["val"]
            first = graph.call_function(torch.ops.aten.sin.default, (first,))
            first.meta["val"] = value
    output.args = ([first, second],)
    pack(graph)
    graph.lint()
    assert sums_of(graph) == [[128]]


@pytest.mark.parametrize("module", [setting, packed_sums, pushed_sums])
def test_code_is_cached_for_the_files_of_the_pass(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "get_hash_for_files", lambda paths: paths)
    assert module.__file__ in ReplacingPass(OP, Sums(ON_CPU)).uuid()[1]


def test_no_gradient_is_a_view_of_what_was_packed() -> None:
    """A training loop may write into one in place, or keep one of them."""
    graph = graph_of(lambda x, y, z: [total(x), total(y)])
    pack(graph)
    first, second = run_on_both(graph, inputs(0))[0]
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def drawn(seed: int) -> Callable[..., list[Tensor]]:
    """Sums of two groups that are read late, early, by others, or only leave."""

    def run(*given: Tensor) -> list[Tensor]:
        draw, known, left, pending = random.Random(seed), list(given), [], []
        for _ in range(draw.randint(4, 16)):
            one, other = draw.choice(known), draw.choice(known)
            kind = draw.choice(("product", "sum", "start", "end", "gradient", "gradient"))
            if kind == "product":
                known.append((one @ other).sin())
            elif kind == "sum":
                known.append(total(one.contiguous(), draw.choice("01")) + other)
            elif kind == "start":
                pending.append(ops.all_reduce(one[: draw.randint(1, 8)].contiguous(), "sum", draw.choice("01")))
            elif kind == "end" and pending:
                left.append(ops.wait_tensor(pending.pop(0)).to(torch.float64))
            elif kind == "gradient":
                found = total(one.sum(0), draw.choice("01"))
                left.append(draw.choice((found, found.view(2, 4), found.double() * 2)))
        return [*left, *(ops.wait_tensor(one) for one in pending), known[-1]]

    return run


def test_drawn_graphs_compute_what_they_did_with_fewer_sums() -> None:
    fewer = 0
    for seed in range(60):
        graph = graph_of(drawn(seed))
        before, expected = sums_of(graph), run_on_both(graph, inputs(seed))
        pack(graph)
        graph.lint()
        assert list(graph.nodes) == [*reversed([*reversed(graph.nodes)])]
        fewer += len(sums_of(graph)) < len(before)
        for rank, found in enumerate(run_on_both(graph, inputs(seed))):
            assert all(torch.equal(x, y) for x, y in zip(expected[rank], found, strict=True)), seed
    assert fewer > 30


def test_fake_tensors_of_the_graph_are_those_of_its_values() -> None:
    """Inductor lowers by them."""
    graph = graph_of(gradients)
    pack(graph)
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function":
            assert isinstance(value, Tensor), node
    (start,) = graph.find_nodes(op="call_function", target=ops.all_reduce.default)
    assert start.meta["val"].shape == (32,)
