"""Every reason that the installed torch can give has words of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tpcompile.fusion.reasons import _KNOWN, Boundary, reason_of

FILES = ("scheduler.py", "choices.py", "codegen/simd.py")


def reasons_of_torch() -> Iterator[str]:
    """The texts that Inductor's sources pass to a WhyNoFuse."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    for name in FILES:
        tree = ast.parse(Path(spec.origin).with_name("_inductor").joinpath(name).read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func)
            if (function == "why" or function.startswith("WhyNoFuse(")) and isinstance(call.args[0], ast.Constant):
                yield str(call.args[0].value)


def test_every_reason_in_the_sources_of_torch_is_known() -> None:
    found = set(reasons_of_torch())
    assert len(found) > 30  # they are found at all
    assert found - _KNOWN.keys() == set()


@pytest.mark.parametrize(
    ("logged", "boundary"),
    [
        ("device mismatch (cpu vs cuda:0)", Boundary.DEVICE),
        ("numel/rnumel mismatch (non-reduce) (8, 16), (1, 1)", Boundary.SHAPE),
        ("something new", Boundary.UNKNOWN),
    ],
)
def test_a_logged_text_with_its_numbers_is_recognised(logged: str, boundary: Boundary) -> None:
    assert reason_of(logged).boundary is boundary
