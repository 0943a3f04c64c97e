"""Records as JSON."""

from __future__ import annotations

import json
import math

import pytest

from tpcompile.evidence.records import Frozen


class _Measured(Frozen):
    value: float
    by_name: dict[str, float] = {}


@pytest.mark.parametrize("value", [1.5, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_strings_and_come_back(value: float) -> None:
    text = _Measured(value=value, by_name={"x": value}).to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert _Measured.model_validate_json(text) == _Measured(value=value, by_name={"x": value})


def test_nan_is_a_string_in_json_and_comes_back() -> None:
    text = _Measured(value=math.nan).to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert math.isnan(_Measured.model_validate_json(text).value)


def test_equal_records_have_equal_text_whatever_the_order_of_their_mappings() -> None:
    one, other = ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0})
    assert _Measured(value=0, by_name=one).to_json() == _Measured(value=0, by_name=other).to_json()
