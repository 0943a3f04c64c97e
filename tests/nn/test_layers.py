"""Linears and norms on two gloo ranks: right against one device in float64, and visibly wrong when built wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives, InPlaceCollectives
from tpcompile.errors import ConfigError
from tpcompile.nn.linear import ColumnParallelLinear, PackedColumnLinear, RowParallelLinear
from tpcompile.nn.norm import DistributedQKNorm, DistributedRMSNorm, PerHeadQKNorm, PerHeadRMSNorm
from tpcompile.nn.state import load_full_state_dict, local_slices_of
from tpcompile.numerics.draw import head_scales
from tpcompile.testing import run_on_ranks

F64 = {"dtype": torch.float64}
WIDTH, HEADS = 5120, 40


class ShardLocal(Collectives):
    """A norm over the local shard: local sum x size, so that the division by the full width gives the local mean."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        return x * self.size


class Dropped(Collectives):
    """Reduces, then drops the result of the out-of-place reduce (HiDream's bug)."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        super().all_reduce(x, dst)
        return x


class IdentityBackward(Collectives):
    """Uses the row-linear contract for every reduce."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        return super().all_reduce(x, "I")


class NoEntry(Collectives):
    """Forgets copy_to_tp."""

    def copy_to_tp(self, x: Tensor) -> Tensor:
        return x


class DoubleEntry(Collectives):
    """Enters the TP region twice."""

    def copy_to_tp(self, x: Tensor) -> Tensor:
        return super().copy_to_tp(super().copy_to_tp(x))


class ColumnRow(nn.Module):
    """Column linear, GELU, row linear."""

    def __init__(self, comm: Any, bias_first: bool = False) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(6, 8, bias=True, comm=comm, **F64)
        self.down = RowParallelLinear(8, 6, bias=True, comm=comm, **F64)
        self.bias_first = bias_first

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.bias_first:
            return self.down.comm.all_reduce(F.linear(h, self.down.weight, self.down.bias))
        return self.down(h)


class PackedGate(nn.Module):
    """Packed gate and up, row linear."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.gate_up = PackedColumnLinear(6, (8, 8), bias=True, comm=comm, **F64)
        self.down = RowParallelLinear(8, 6, bias=False, comm=comm, **F64)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(F.silu(gate) * up)


def _on_shard(make: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """A norm between a replicated input and a replicated output, as in attention."""

    class Around(nn.Module):
        def __init__(self, comm: Any) -> None:
            super().__init__()
            self.norm = make(comm)
            self.entry, self.leave = Collectives(comm.group), RowParallelLinear(16, 6, bias=False, comm=comm, **F64)
            self.leave.comm = self.entry
            self.wide = isinstance(self.norm, DistributedQKNorm | PerHeadQKNorm)

        def forward(self, x: Tensor) -> Tensor:
            x_local = local_slices_of({"leave.weight": self.entry.copy_to_tp(x)}, module=self)["leave.weight"]
            if not self.wide:
                return self.leave(self.norm(x_local).sin())
            q, k = self.norm(x_local, x_local.cos())
            return self.leave(q.sin() * k)

    return Around


MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "column row": ColumnRow,
    "bias before reduce": lambda comm: ColumnRow(comm, bias_first=True),
    "packed": PackedGate,
    "norm": _on_shard(lambda comm: DistributedRMSNorm(16, eps=1e-6, comm=comm, **F64)),
    "qk norm": _on_shard(lambda comm: DistributedQKNorm(16, 16, eps=1e-6, comm=comm, **F64)),
    "per head": _on_shard(lambda comm: PerHeadRMSNorm(4, eps=1e-6, comm=comm, **F64)),
    "per head qk": _on_shard(lambda comm: PerHeadQKNorm(4, eps=1e-6, comm=comm, **F64)),
}
RIGHT = ["column row", "packed", "norm", "qk norm", "per head", "per head qk"]


def _fill(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: torch.randn(p.shape, generator=generator, **F64) for n, p in module.named_parameters()}


def _errors(name: str, comm: Any, backend: str | None = None) -> dict[str, float]:
    """Relative error of output, input gradient and worst parameter gradient against one device."""
    torch._dynamo.reset()
    single = MODULES["column row" if name == "bias before reduce" else name](Collectives(None))
    sharded = MODULES[name](comm)
    full = _fill(single)
    for module in (single, sharded):
        load_full_state_dict(module, full)
    x = torch.randn(3, 16 if hasattr(single, "norm") else 6, generator=torch.Generator().manual_seed(6), **F64)
    x = x * torch.linspace(0.2, 3, x.shape[1], **F64)
    run = torch.compile(sharded, backend=backend, fullgraph=True) if backend else sharded
    outputs, inputs = [], [x.clone().requires_grad_() for _ in range(2)]
    for module, leaf in zip((single, run), inputs, strict=True):
        y = module(leaf)
        (y.sin() * torch.linspace(1, 2, y.numel(), **F64).view(y.shape)).sum().backward()
        outputs.append(y.detach())
    grads = {n: p.grad for n, p in single.named_parameters()}
    pairs = [(p.grad, local_slices_of({n: grads[n]}, module=sharded)[n]) for n, p in sharded.named_parameters()]
    return {
        "output": _relative(outputs[1], outputs[0]),
        "input": _relative(inputs[1].grad, inputs[0].grad),
        "weights": max(_relative(*pair) for pair in pairs),
    }


def _relative(value: Any, reference: Any) -> float:
    return ((value - reference).norm() / reference.norm()).item()


def _full_width_norm(comm: Any, *, skewed: bool) -> float:
    """Error of a norm of Wan-14B's width on this rank's shard."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7), **F64)
    x = x * head_scales(HEADS, WIDTH, device="cpu") if skewed else x
    norms = [DistributedRMSNorm(WIDTH, eps=1e-6, comm=c, **F64) for c in (Collectives(None), comm)]
    for norm in norms:
        nn.init.ones_(norm.weight)
    rank = dist.get_rank()
    return _relative(norms[1](x.chunk(2, -1)[rank]), norms[0](x).chunk(2, -1)[rank])


def _worker() -> dict[str, Any]:
    g = dist.group.WORLD
    right, mistakes = Collectives(g), (ShardLocal, Dropped, IdentityBackward, NoEntry, DoubleEntry)
    wrong = {mistake.__name__: mistake(g) for mistake in mistakes}
    widths = {
        (kind, skewed): _full_width_norm(comm, skewed=skewed)
        for skewed in (False, True)
        for kind, comm in (("right", right), ("ShardLocal", wrong["ShardLocal"]))
    }
    return {
        "right": {name: _errors(name, right) for name in RIGHT},
        "bias before reduce": _errors("bias before reduce", right),
        "wrong": {(name, kind): _errors(name, wrong[kind]) for name, kind in WRONG},
        "in place": {backend: _errors("column row", InPlaceCollectives(g), backend) for backend in (None, "aot_eager")},
        "widths": widths,
    }


# (module, mistake) -> what must be visibly wrong; everything else of it stays right.
WRONG: dict[tuple[str, str], set[str]] = {
    ("column row", "Dropped"): {"output", "input", "weights"},
    ("norm", "Dropped"): {"output", "input", "weights"},
    ("norm", "ShardLocal"): {"output", "input", "weights"},
    ("norm", "IdentityBackward"): {"input"},
    ("qk norm", "IdentityBackward"): {"input"},
    ("per head", "NoEntry"): {"weights"},
    ("per head qk", "NoEntry"): {"weights"},
    ("column row", "NoEntry"): {"input"},
    ("column row", "DoubleEntry"): {"input"},
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, timeout_s=120)


@pytest.mark.parametrize("name", RIGHT)
def test_layer_equals_one_device(ranks: list[dict[str, Any]], name: str) -> None:
    assert max(error for r in ranks for error in r["right"][name].values()) < 1e-12


@pytest.mark.parametrize(("name", "mistake"), WRONG, ids=lambda part: part.replace(" ", "_"))
def test_mistake_is_visible_and_only_where_expected(ranks: list[dict[str, Any]], name: str, mistake: str) -> None:
    for r in ranks:
        errors = r["wrong"][name, mistake]
        assert {what for what, error in errors.items() if error > 0.02} == WRONG[name, mistake], errors


def test_bias_before_the_reduce_counts_once_per_rank(ranks: list[dict[str, Any]]) -> None:
    wrong = [r["bias before reduce"] for r in ranks]
    assert min(errors["output"] for errors in wrong) > 0.1


def test_shard_local_norm_hides_on_iid_data_and_shows_on_head_skewed_data(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        assert max(r["widths"]["right", skewed] for skewed in (False, True)) < 1e-12
        assert r["widths"]["ShardLocal", False] < 0.02, "below a bf16 tolerance: iid data cannot see it"
        assert r["widths"]["ShardLocal", True] > 0.1


def test_in_place_reduce_has_a_different_gradient_under_compile_than_in_eager(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        eager, compiled = r["in place"][None], r["in place"]["aot_eager"]
        assert max(eager["output"], compiled["output"], eager["weights"]) < 1e-12
        assert compiled["weights"] == pytest.approx(1.0), "twice the gradient at tp 2"


class _Two(Collectives):
    """Size 2 without a group."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size = 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColumnParallelLinear(4, 7, bias=False, comm=_Two()),
        lambda: PackedColumnLinear(4, (8, 7), bias=False, comm=_Two()),
        lambda: RowParallelLinear(7, 4, bias=False, comm=_Two()),
        lambda: DistributedRMSNorm(7, eps=1e-6, comm=_Two()),
    ],
    ids=["column", "packed", "row", "norm"],
)
def test_width_that_tp_does_not_divide_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"=7 .*tp=2; .*\[1, 7\]"):
        make()
