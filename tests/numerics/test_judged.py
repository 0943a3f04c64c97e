"""numerics/judged: numbers of a tensor beside those of the reference."""

from __future__ import annotations

import math

import pytest
import torch

from tpcompile.numerics.fingerprints import NUM_SUMS, fingerprint
from tpcompile.numerics.judged import Judged, Known, all_judged, is_near, multiple_of
from tpcompile.numerics.traced import Trace, Value


def test_numbers_whose_squares_are_no_floats_are_compared() -> None:
    """As those of a gradient that has run away."""
    huge = (1e200, -3e220, 5e180)
    assert is_near(huge, huge, 1e-6)
    assert not is_near(huge, tuple(2 * number for number in huge), 1e-6)
    assert multiple_of(tuple(2 * number for number in huge), huge) == pytest.approx(2)
    assert not is_near((math.inf, 1.0), (math.inf, 1.0), 1e-6)
    assert not is_near((1.0, 1.0), (math.inf, 1.0), 1e-6)
    assert multiple_of((1.0, 2.0), (0.0, 0.0)) == 0


def test_what_a_right_result_was_made_of_is_right_and_its_copies_are() -> None:
    """The reference has a value of that shape, and none that is equal."""
    known = Known.of([Trace([Value("aten.add", (2,), (1.0,) * NUM_SUMS, (), None)])])
    own = [
        Value("aten.mul", (2,), (5.0,) * NUM_SUMS, (), None),
        Value("aten.detach", (2,), (5.0,) * NUM_SUMS, (), None, (0,)),
    ]
    of_right = [all_judged(own, known, [], tolerance=1e-5, rank=0, size=2, of_right=places) for places in ((), {0})]
    assert of_right == [[Judged.WRONG] * 2, [Judged.PART] * 2]


def test_scores_that_are_wrong_are_wrong_once_they_are_masked() -> None:
    scores = torch.linspace(-2, 2, 64).view(8, 8)
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    right, wrong = (fingerprint((scores * factor).masked_fill(future, -math.inf)) for factor in (1.0, 1.02))
    assert is_near(right, right, 1e-5) and not is_near(wrong, right, 1e-3)
