"""The gradient contract of every wrapper, on two gloo ranks, against float64 autograd on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.graphs import GraphCapture
from tpcompile.collectives import api as tp
from tpcompile.errors import ConfigError
from tpcompile.testing import run_on_ranks

# Name -> (this rank's part of the work, what one device computes for all ranks). x is [rank, 4, 6]; the loss weighs
# results with w, equal on all ranks where the work is repeated ("I") and w[rank] where the ranks do different work.
Case = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def _split_loss(y: Tensor, w: Tensor, rank: int) -> Tensor:
    return (y.sin() * w[rank].reshape(-1)[: y.numel()].view(y.shape)).sum()


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        "all_reduce I": (
            lambda x, w, r, g: _split_loss(tp.all_reduce(x, group=g, dst="I"), w, 0),
            lambda x, w: _split_loss(x.sum(0), w, 0),
        ),
        "all_reduce R": (
            lambda x, w, r, g: _split_loss(tp.all_reduce(x, group=g, dst="R"), w, r),
            lambda x, w: sum(_split_loss(x.sum(0), w, r) for r in range(len(x))),
        ),
        "copy_to_tp": (
            lambda x, w, r, g: _split_loss(tp.copy_to_tp(x, group=g), w, r),
            lambda x, w: sum(_split_loss(x[0] + 0 * x[r], w, r) for r in range(len(x))),
        ),
    }
    for dim in (0, -1):
        cases[f"all_gather R dim {dim}"] = (
            lambda x, w, r, g, dim=dim: _split_loss(tp.all_gather_single(x, dim=dim, group=g, dst="R"), w, r),
            lambda x, w, dim=dim: sum(_split_loss(torch.cat(tuple(x), dim), w, r) for r in range(len(x))),
        )
        cases[f"all_gather I dim {dim}"] = (
            lambda x, w, r, g, dim=dim: _split_loss(tp.all_gather_single(x, dim=dim, group=g, dst="I"), w, 0),
            lambda x, w, dim=dim: _split_loss(torch.cat(tuple(x), dim), w, 0),
        )
        cases[f"reduce_scatter dim {dim}"] = (
            lambda x, w, r, g, dim=dim: _split_loss(tp.reduce_scatter_single(x, dim=dim, group=g), w, r),
            lambda x, w, dim=dim: sum(_split_loss(x.sum(0).chunk(len(x), dim)[r], w, r) for r in range(len(x))),
        )
    return cases


CASES = _cases()


def _wrappers(g: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "all_reduce": lambda x: tp.all_reduce(x, group=g),
        "copy_to_tp": lambda x: tp.copy_to_tp(x, group=g),
        "all_gather": lambda x: tp.all_gather_single(x, dim=1, group=g),
        "reduce_scatter": lambda x: tp.reduce_scatter_single(x, dim=0, group=g),
    }


def _gradient_error(name: str, rank: int) -> float:
    """Relative error of this rank's input gradient against one device; test_tracing.py compares compiled ones."""
    world, group = dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    full_x = torch.randn(world, 4, 6, dtype=torch.float64, generator=generator)
    if name == "copy_to_tp":
        full_x = full_x[:1].repeat(world, 1, 1)
    w = torch.randn(world, 4 * 6 * world, dtype=torch.float64, generator=generator)
    sharded, single = CASES[name]
    reference = full_x.clone().requires_grad_()
    single(reference, w).backward()
    expected = reference.grad[0 if name == "copy_to_tp" else rank]
    x = full_x[rank].clone().requires_grad_()
    sharded(x, w, rank, group).backward()
    return ((x.grad - expected).norm() / expected.norm()).item()


def _gradchecks(rank: int) -> dict[str, bool]:
    """Functions of a replicated x, perturbed alike on all ranks, so the numerical gradient is the true one."""
    g, scale = dist.group.WORLD, torch.tensor([1.0, 2.5], dtype=torch.float64)[rank]

    def linear(x: Tensor) -> Tensor:
        return tp.all_reduce(tp.copy_to_tp(x, group=g) * scale, group=g, dst="I")

    def norm(x: Tensor, dst: tp.Dst = "R") -> Tensor:
        y = tp.copy_to_tp(x, group=g) * scale
        return tp.all_reduce(y * tp.all_reduce(y * y, group=g, dst=dst) * scale, group=g, dst="I")

    def sequence(x: Tensor) -> Tensor:
        y = tp.reduce_scatter_single(tp.copy_to_tp(x, group=g) * scale, dim=1, group=g)
        z = tp.all_gather_single(y.sin(), dim=1, group=g, dst="R") * scale
        w = tp.reduce_scatter_single(z, dim=0, group=g)
        return tp.all_gather_single(w.cos(), dim=0, group=g, dst="I")

    def no_entry(x: Tensor) -> Tensor:
        return tp.all_reduce(x * scale, group=g, dst="I")

    checks = {
        "linear": linear,
        "norm": norm,
        "sequence": sequence,
        "norm with dst=I": lambda x: norm(x, "I"),
        "linear without copy_to_tp": no_entry,
    }
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    return {name: torch.autograd.gradcheck(fn, (x,), raise_exception=False) for name, fn in checks.items()}


def _leaves_input_alone(rank: int) -> dict[str, bool]:
    kept: dict[str, bool] = {}
    wrappers = _wrappers(dist.group.WORLD)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> list[Tensor]:
        return [fn(x) for fn in wrappers.values()]

    for needs_grad in (False, True):
        x = torch.full((4, 6), float(rank + 1), requires_grad=needs_grad)
        found = compiled(x)
        kept[f"grad={needs_grad} compiled"] = bool((x == rank + 1).all())
        for (name, fn), value in zip(wrappers.items(), found, strict=True):
            y = fn(x)
            kept[f"{name} grad={needs_grad}"] = bool((x == rank + 1).all()) and type(y) is Tensor
            kept[f"{name} grad={needs_grad} compiled"] = torch.equal(value, y)
            kept[f"{name} grad={needs_grad} strided"] = torch.equal(fn(x.t().contiguous().t()), y)
    x = torch.ones(4)
    dist.all_reduce(x.contiguous())
    kept["contiguous() is a copy"] = bool((x == 1).all())
    return kept


def _messages(rank: int) -> dict[str, str]:
    """Only rank 0 makes the mistakes: if one of them communicated, it would wait for rank 1 until the time limit."""
    g, x = dist.group.WORLD, torch.ones(3, 5)
    mistakes: dict[str, Callable[[], Any]] = {  # the types say so, too: those are the mistakes
        "not a tensor": lambda: tp.all_reduce([1.0], group=g),  # type: ignore[arg-type]  # wrong on purpose
        "dst": lambda: tp.all_reduce(x, group=g, dst="P"),  # type: ignore[arg-type]  # wrong on purpose
        "gather dst": lambda: tp.all_gather_single(x, dim=0, group=g, dst="P"),  # type: ignore[arg-type]  # wrong on purpose
        "op": lambda: tp.all_reduce(x, group=g, op="mean"),
        "product with gradient": lambda: tp.all_reduce(x.clone().requires_grad_(), group=g, op="product"),
        "indivisible": lambda: tp.reduce_scatter_single(x, dim=1, group=g),
        "dim": lambda: tp.all_gather_single(x, dim=2, group=g),
    }
    messages = {}
    for name, mistake in mistakes.items() if rank == 0 else ():
        try:
            mistake()
        except ConfigError as error:
            messages[name] = str(error)
    return messages


def _combined(x: Tensor, group: Any) -> Tensor:
    y = tp.all_reduce(tp.copy_to_tp(x, group=group) * 2, group=group, dst="R").sin()
    z = tp.reduce_scatter_single(y, dim=1, group=group)
    z = tp.all_gather_single(z.cos(), dim=1, group=group, dst="R")
    return tp.all_gather_single(tp.all_reduce(z, group=group).sin(), dim=1, group=group, dst="I")


def _graph_texts(fn: Callable[[Tensor], Tensor]) -> list[tuple[str, str]]:
    torch._dynamo.reset()
    capture = GraphCapture()
    x = torch.ones(4, 6, requires_grad=True)
    torch.compile(fn, backend=capture, fullgraph=True)(x).sum().backward()
    return capture.texts


def _size_one(rank: int) -> dict[str, Any]:
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    x = torch.ones(4, 6, requires_grad=True)
    same = [fn(x) is x for g in (None, groups[rank]) for fn in _wrappers(g).values()]
    texts = _graph_texts(lambda x: sum(fn(x) for fn in _wrappers(groups[rank]).values()) * 2)
    return {"same": same, "ops": [text for _, text in texts if "c10d" in text]}


def _values(rank: int) -> dict[str, Tensor]:
    x = torch.tensor([1.0 + rank, 5.0 - rank])
    g = dist.group.WORLD
    return {op: tp.all_reduce(x, group=g, op=op) for op in ("sum", "min", "max", "product")}


def _worker() -> dict[str, Any]:
    rank, g = dist.get_rank(), dist.group.WORLD
    return {
        "gradients": {name: _gradient_error(name, rank) for name in CASES},
        "gradchecks": _gradchecks(rank),
        "inputs": _leaves_input_alone(rank),
        "messages": _messages(rank),
        "values": _values(rank),
        "size one": _size_one(rank),
        "neutral": _graph_texts(lambda x: _combined(x, g)),
        "baked": _graph_texts(lambda x: tp.copy_to_tp(x, group=g).narrow(0, 2 * rank, 2)),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, timeout_s=240)


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_one_device(ranks: list[dict[str, Any]], name: str) -> None:
    assert max(r["gradients"][name] for r in ranks) < 1e-14


@pytest.mark.parametrize("name", ["linear", "norm", "sequence"])
def test_gradcheck_passes(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(r["gradchecks"][name] for r in ranks)


@pytest.mark.parametrize("name", ["norm with dst=I", "linear without copy_to_tp"])
def test_gradcheck_fails_on_the_wrong_contract(ranks: list[dict[str, Any]], name: str) -> None:
    assert not any(r["gradchecks"][name] for r in ranks)


def test_input_is_never_overwritten_and_result_is_a_plain_tensor(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        bad = [name for name, kept in r["inputs"].items() if not kept]
        assert bad == ["contiguous() is a copy"], "only the negative control may overwrite its input"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not a tensor", "is a list"),
        ("dst", "dst='P'"),
        ("gather dst", "dst='P'"),
        ("op", "op='mean'"),
        ("product with gradient", "op='product' has no gradient"),
        ("indivisible", "size 5 of dim 1 is not divisible by the group"),
        ("dim", "dim=2 is out of range for a tensor with 2 dims"),
    ],
)
def test_mistake_is_refused_before_any_communication(ranks: list[dict[str, Any]], name: str, text: str) -> None:
    assert text in ranks[0]["messages"][name]


def test_other_reduce_ops_work_without_gradient(ranks: list[dict[str, Any]]) -> None:
    expected = {"sum": [3.0, 9.0], "min": [1.0, 4.0], "max": [2.0, 5.0], "product": [2.0, 20.0]}
    assert all({op: y.tolist() for op, y in r["values"].items()} == expected for r in ranks)


def test_size_one_group_returns_the_input_and_adds_no_op(ranks: list[dict[str, Any]]) -> None:
    assert all(r["size one"] == {"same": [True] * 8, "ops": []} for r in ranks)
    assert any("c10d" in text for _, text in ranks[0]["neutral"]), "the search must find collectives where there are"


def test_graphs_are_equal_on_all_ranks_down_to_the_backward(ranks: list[dict[str, Any]]) -> None:
    assert [kind for kind, _ in ranks[0]["neutral"]] == ["dynamo", "forward", "backward"]
    assert ranks[0]["neutral"] == ranks[1]["neutral"]


def test_a_rank_constant_makes_graphs_differ(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["baked"] != ranks[1]["baked"]
