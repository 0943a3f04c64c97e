"""What is written by hand: faults are found at their line, correct modules raise no alarm and are judged whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from tests.typecheck import by_hand, positions
from tests.typecheck.by_hand import Copy, Reduce
from tests.typecheck.cases import Case
from tests.typecheck.programs import PLAIN, TP, WIDTH, built
from tpcompile.typecheck import Report, check_types

X = torch.ones(4, 8, WIDTH)
BROKEN = (*by_hand.BROKEN, *positions.BROKEN)
CORRECT = (*by_hand.CORRECT, *positions.CORRECT)
RULES = {
    "copied_twice": "function-gradient",
    "tokens_f_after_gather": "function-gradient",
    "tokens_norm": "function-gradient",
    "swapped": "double-reduce",
    "f_without_reduce": "missing-copy",
    "embedding_unmasked": "lookup-without-mask",
    "loss_unmasked": "lookup-without-mask",
    "rotary_local": "local-positions",
    "causal_ranges": "local-positions",
}
"""The kind of mistake, where it is not that of the wrappers' rules."""


def _name(case: Case) -> str:
    return case.forward.__name__


def _report(case: Case, **options: Any) -> Report:
    types = {"input_types": (case.input_type,), "output_type": case.output_type}
    return check_types(built(case.forward, **case.layouts), (X,), tp=TP, **types, **options)


@pytest.mark.parametrize("case", BROKEN, ids=_name)
def test_a_fault_is_found_at_its_line(case: Case) -> None:
    report = _report(case)
    assert report.finding is not None and "# wrong" in report.finding.site.source, str(report)
    assert report.finding.rule == RULES.get(_name(case), report.finding.rule)


@pytest.mark.parametrize("case", CORRECT, ids=_name)
def test_a_correct_module_is_judged_whole_without_an_alarm(case: Case) -> None:
    _report(case).raise_on_violation(strict=True)


@pytest.mark.parametrize("case", CORRECT, ids=_name)
def test_a_correct_module_raises_no_alarm_without_gradients(case: Case) -> None:
    _report(case, train=False).raise_on_violation()


class Unknown(torch.autograd.Function):
    """Its backward mixes what the ranks hold, by an op without a rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.fft.rfft(grad).real.sum() * grad


def unknown(m: Any, x: Tensor) -> Tensor:
    h = Unknown.apply(torch.nn.functional.linear(Copy.apply(x, m.comm.group), m.up))
    return Reduce.apply(torch.nn.functional.linear(h, m.down), m.comm.group)


def test_a_backward_that_cannot_be_judged_is_said_in_the_first_line() -> None:
    report = check_types(built(unknown, **PLAIN), (X,), tp=TP, input_types=("I",))
    assert report.finding is None and not report.is_complete
    assert f"since Unknown at {Path(__file__).name}:" in str(report).splitlines()[0]


class Raising(Unknown):
    """Its backward raises."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("only in a real backward pass")


def raising(m: Any, x: Tensor) -> Tensor:
    return Raising.apply(x)


def test_a_backward_that_raises_is_not_judged() -> None:
    report = check_types(built(raising, **PLAIN), (X,), tp=TP, input_types=("I",))
    assert report.finding is None and report.not_followed_since.startswith("Raising at test_by_hand.py:")


def test_nothing_of_functions_stays_changed() -> None:
    _report(by_hand.CORRECT[0])
    assert "apply" not in vars(_SingleLevelFunction)
