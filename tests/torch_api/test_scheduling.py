"""The names of Inductor's scheduler that the recorder reads; what moved is said by tests/fusion/test_recorder.py."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from tpcompile.torch_api import scheduling


def test_a_refusal_is_logged_as_an_object_with_both_names_and_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Node:
        def __init__(self, name: str) -> None:
            self.get_name = lambda: name

    nodes: list[Any] = [Node("op0"), Node("op1")]
    current = scheduling._Current()
    current.graph = scheduling._Graph()
    with scheduling._fusion_log(scheduling._LogHandler(current)):
        scheduling._scheduler.WhyNoFuse(*nodes)("device mismatch (%s vs %s)", "cpu", "cuda")
    (reason,) = current.graph.refused["op0", "op1"]
    assert list(current.graph.refused) == [("op0", "op1")] and "cpu vs cuda" in reason


def test_a_score_is_made_of_numbers() -> None:
    from torch._inductor.choices import FusionScore

    assert all(field.type in ("int", "bool", int, bool) for field in dataclasses.fields(FusionScore))


def test_the_choices_are_asked_about_two_nodes() -> None:
    from torch._inductor.choices import InductorChoices

    for name in ("can_fuse", "can_fuse_vertical", "can_fuse_horizontal"):
        parameters = list(inspect.signature(getattr(InductorChoices, name)).parameters)
        assert parameters == ["scheduler", "node1", "node2", "shared_data_score"]
    assert list(inspect.signature(InductorChoices.score_fusion).parameters) == ["scheduler", "node1", "node2"]
