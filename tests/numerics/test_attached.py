"""Lines that cut a gradient off are seen, and each is left out alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from tpcompile.numerics.attached import Cut, attached, cuts_of
from tpcompile.numerics.optimizer_step import followed


def cut_thrice(x: Tensor) -> Tensor:
    doubled = x.data * 2
    tripled = x.detach() * 3
    with torch.no_grad():
        fourfold = x * 4
    return doubled + tripled + fourfold + x


def seen() -> list[Cut]:
    found: list[Cut] = []
    with cuts_of(found):
        cut_thrice(torch.ones(2, requires_grad=True))
    return found


def test_each_is_seen_with_its_line() -> None:
    first = inspect.getsourcelines(cut_thrice)[1]
    assert [(cut.what, cut.line.line - first) for cut in seen()] == [("data", 1), ("detach", 2), ("no_grad", 3)]


@pytest.mark.parametrize(("number", "gradient"), [(0, 3.0), (1, 4.0), (2, 5.0)])
def test_without_one_of_them_its_gradient_arrives(number: int, gradient: float) -> None:
    x = torch.ones(2, requires_grad=True)
    with attached(seen()[number]):
        y = cut_thrice(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert found.tolist() == [gradient] * 2


def test_what_an_optimizer_does_without_gradients_is_no_cut() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    found: list[Cut] = []
    with cuts_of(found):
        optimizer.step()
    assert found == []


def test_what_follows_the_run_cuts_nothing_of_the_program() -> None:
    """It keeps the weights as they were before a step; without that the step's own values would stand there."""
    module = torch.nn.Linear(2, 2)
    found: list[Cut] = []
    with cuts_of(found), followed(module) as step:
        step.made()
    assert found == []
