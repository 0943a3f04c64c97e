"""numerics/judged: numbers of a tensor beside those of the reference."""

from __future__ import annotations

import math

import pytest

from tpcompile.numerics.judged import is_near, multiple_of


def test_numbers_whose_squares_are_no_floats_are_compared() -> None:
    """As those of a gradient that has run away."""
    huge = (1e200, -3e220, 5e180)
    assert is_near(huge, huge, 1e-6)
    assert not is_near(huge, tuple(2 * number for number in huge), 1e-6)
    assert multiple_of(tuple(2 * number for number in huge), huge) == pytest.approx(2)
    assert not is_near((math.inf, 1.0), (math.inf, 1.0), 1e-6)
    assert not is_near((1.0, 1.0), (math.inf, 1.0), 1e-6)
    assert multiple_of((1.0, 2.0), (0.0, 0.0)) == 0
