"""What the optimizers of a call were given and made, and that all is as before the call afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tpcompile.numerics.optimizer_step import followed

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda given: AdamW(given, lr=0.1, fused=True),
    "foreach": lambda given: Adam(given, lr=0.1, foreach=True, amsgrad=True),
    "plain": lambda given: SGD(given, lr=0.1, momentum=0.9, foreach=False),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))


def train(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    module(X).square().sum().backward()
    optimizer.step()


def state_of(module: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    states = (
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )
    return [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers(), *states)]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_weights_buffers_and_the_optimizer_are_as_before(name: str, steps_before: int) -> None:
    module = model()
    optimizer = MAKE[name](module.parameters())
    for _ in range(steps_before):
        train(module, optimizer)
    before, rate = state_of(module, optimizer), optimizer.param_groups[0]["lr"]
    with followed(module) as step:
        train(module, optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        assert step.has_changed
        assert not torch.equal(before[0], next(module.parameters()))
    after = state_of(module, optimizer)
    assert len(after) == len(before) and all(map(torch.equal, before, after))
    assert optimizer.param_groups[0]["lr"] == rate


def test_what_a_step_made_has_the_parameters_names() -> None:
    module = model()
    with followed(module) as step:
        train(module, AdamW(module.parameters(), lr=0.1))
        made = step.made()
    of_first = {what for what, name in made if name == "0.weight"}
    assert of_first == {"gradient", "exp_avg", "exp_avg_sq", "weight"}
    assert torch.equal(made["gradient", "1.bias"], module[1].bias.grad)  # type: ignore[index]


def test_a_step_by_hand_is_seen_and_a_call_without_one_is_none() -> None:
    module = model()
    with followed(module) as step:
        module(X).sum().backward()
        assert not step.has_changed
        with torch.no_grad():
            module[0].bias.add_(1)  # type: ignore[index]
        assert step.has_changed


def test_parameters_of_a_function_have_their_place_in_the_optimizer() -> None:
    module = model()
    with followed(None) as step:
        train(module, SGD(module.parameters(), lr=0.1))
        assert ("gradient", "parameter 0.1") in step.made()


def test_an_optimizer_of_views_of_parameters_is_followed_by_their_places() -> None:
    """As one that has this rank's rows of each weight: plain tensors, which no module names."""
    module = model()
    rows = next(module.parameters()).detach()[:2]
    before = rows.clone()
    optimizer = SGD([rows], lr=0.1)
    with followed(module) as step:
        rows.grad = torch.ones_like(rows)
        optimizer.step()
        made = step.made()
        assert torch.equal(made["gradient", "parameter 0.0"], torch.ones_like(rows))
        assert torch.allclose(made["weight", "parameter 0.0"], before - 0.1)
    assert torch.equal(rows, before)
