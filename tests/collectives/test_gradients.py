"""gradcheck of every collective in every form, on 2 and 4 gloo ranks in lockstep, by the contract's types."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.collectives.forms import FORMS, Form, x_shape
from tpcompile.collectives import api as tp
from tpcompile.testing import run_on_ranks

# A form under a type it does not have: gradcheck must go red.
WRONG = {
    "all_reduce I as R": ("all_reduce sum I", "V", "R"),
    "all_reduce R as I": ("all_reduce sum R", "V", "I"),
    "average I as R": ("all_reduce avg I", "V", "R"),
    "maximum R as I": ("all_reduce max R", "V", "I"),
    "copy_to_tp of a partial gradient": ("copy_to_tp", "R", "R"),
    "gather I as R": ("all_gather I dim 0", "V", "R"),
    "gather R as I": ("all_gather R dim 1", "V", "I"),
    "scatter I as R": ("scatter I dim 0", "R", "V"),
    "scatter R as I": ("scatter R dim 0", "I", "V"),
    "broadcast R as I": ("broadcast R", "V", "I"),
    "started I as R": ("all_reduce_start sum I", "V", "R"),
}


class _Lockstep(torch.autograd.Function):
    """All ranks' inputs in one flat vector -> all ranks' outputs in one, equal on all ranks.

    An I tensor stands once and its gradients must be equal; an R input stands once and its gradients are summed; an I
    output has one cotangent, R and V outputs one per rank.
    """

    @staticmethod
    def forward(ctx: Any, full: Tensor, form: Form, takes: str, gives: str) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        shapes = [x_shape(form, r, world) for r in range(world)]
        own = full if takes != "V" else full.split([a * b for a, b in shapes])[rank]
        with torch.enable_grad():
            x = own.detach().clone().view(shapes[rank]).requires_grad_()
            y = form.call(x, dist.group.WORLD)
        ctx.x, ctx.y, ctx.takes, ctx.gives = x, y, takes, gives
        everyone = _everyone(y.detach().flatten())
        if gives == "I":
            assert all(torch.equal(one, everyone[0]) for one in everyone), "an I result differs between ranks"
            return everyone[0].clone()
        ctx.lengths = [len(one) for one in everyone]
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own = grad if ctx.gives == "I" else grad.split(ctx.lengths)[dist.get_rank()]
        (found,) = torch.autograd.grad(ctx.y, ctx.x, own.reshape(ctx.y.shape), retain_graph=True)
        everyone = _everyone(found.flatten())
        if ctx.takes == "I" and not all(torch.equal(one, everyone[0]) for one in everyone):
            return torch.full_like(everyone[0], float("nan")), None, None, None
        joined = {"V": lambda: torch.cat(everyone), "I": lambda: everyone[0], "R": lambda: sum(everyone)}
        return joined[ctx.takes](), None, None, None


def _everyone(x: Tensor) -> list[Tensor]:
    """x of every rank, of up to 127 elements, with one collective."""
    row = torch.zeros(128, dtype=torch.float64)
    row[0], row[1 : 1 + len(x)] = len(x), x
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [one[1 : 1 + int(one[0])] for one in rows]


def _is_right(form: Form, takes: str, gives: str) -> bool:
    world = dist.get_world_size()
    shapes = [x_shape(form, r, world) for r in range(world if takes == "V" else 1)]
    generator = torch.Generator().manual_seed(7)
    full = torch.randn(sum(a * b for a, b in shapes), dtype=torch.float64, generator=generator)

    def fn(full: Tensor) -> Tensor:
        return _Lockstep.apply(full, form, takes, gives).sin()

    # On a mismatch torch goes through all elements one by one for its message, with hundreds of collectives.
    with mock.patch("torch.autograd.gradcheck._run_slow_mode_and_get_error", return_value=""):
        return torch.autograd.gradcheck(
            fn, (full.requires_grad_(),), raise_exception=False, check_undefined_grad=False, fast_mode=True
        )


def _ties() -> bool:
    """Gradient of the maximum among ties and of NaN, against torch.amax over all ranks' inputs."""
    rank = dist.get_rank()
    full = torch.tensor([[1.0, 2.0, 3.0, 0.0], [1.0, 5.0, 3.0, -1.0]], dtype=torch.float64)
    reference = full.clone().requires_grad_()
    cotangent = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    reference.amax(0).backward(cotangent)
    x = full[rank].clone().requires_grad_()
    tp.all_reduce(x, group=dist.group.WORLD, op="max").backward(cotangent)
    assert reference.grad is not None and x.grad is not None
    return torch.equal(x.grad, reference.grad[rank])


def _infinite_cotangent() -> list[float]:
    """Gradient of a broadcast for an infinite cotangent: zero, not NaN, where x was not used."""
    x = torch.ones(2, requires_grad=True)
    tp.broadcast(x, src=0, group=dist.group.WORLD).backward(torch.tensor([float("inf"), 1.0]))
    assert x.grad is not None
    return x.grad.tolist()


def _worker() -> dict[str, Any]:
    return {
        "right": {name: _is_right(form, form.takes, form.gives) for name, form in FORMS.items()},
        "wrong": {name: _is_right(FORMS[form], takes, gives) for name, (form, takes, gives) in WRONG.items()},
        "ties": _ties() if dist.get_world_size() == 2 else True,
        "infinite": _infinite_cotangent(),
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_on_ranks(_worker, world_size=request.param, timeout_s=240)


@pytest.mark.parametrize("name", FORMS)
def test_gradient_is_the_one_the_contract_states(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(r["right"][name] for r in ranks)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_makes_the_check_red(ranks: list[dict[str, Any]], name: str) -> None:
    assert not any(r["wrong"][name] for r in ranks)


def test_ties_share_the_gradient_as_in_amax(ranks: list[dict[str, Any]]) -> None:
    assert all(r["ties"] for r in ranks)


def test_broadcast_gives_zeros_to_the_others_whatever_the_cotangent(ranks: list[dict[str, Any]]) -> None:
    assert [r["infinite"] for r in ranks] == [[float("inf"), 1.0], *[[0.0, 0.0]] * (len(ranks) - 1)]
