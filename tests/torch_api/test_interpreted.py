"""Triton's interpreter: what is changed in it is there, and without numpy the error says what to install."""

from __future__ import annotations

import sys

import pytest

from tpcompile.errors import PreflightError
from tpcompile.torch_api import interpreted

pytest.importorskip("triton")
np = pytest.importorskip("numpy")


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch):
    """Triton's interpreter, as it was again after the test."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_masked_load", builder.create_masked_load)
    with np.errstate():
        yield interpreter


def test_float32_is_rounded_to_the_nearest_bfloat16(interpreter) -> None:
    import triton.language as tl

    values = np.array([1.0, 1.0 + 3 * 2.0**-9, -(1.0 + 3 * 2.0**-9)], dtype=np.float32)
    truncated = interpreter._convert_float(values, tl.float32, tl.bfloat16, None)
    interpreted.like_gpus()
    rounded = interpreter._convert_float(values, tl.float32, tl.bfloat16, None)
    assert rounded.tolist() == [0x3F80, 0x3F81, 0xBF81]
    assert truncated.tolist() == [0x3F80, 0x3F80, 0xBF80], "Triton rounds by itself: `like_gpus` can go"


def test_other_conversions_stay_as_they_are(interpreter) -> None:
    import triton.language as tl

    values = np.array([1.5], dtype=np.float16)
    before = interpreter._convert_float(values.view(np.uint16), tl.float16, tl.float32, None)
    interpreted.like_gpus()
    after = interpreter._convert_float(values.view(np.uint16), tl.float16, tl.float32, None)
    assert before.tolist() == after.tolist()


def test_only_a_volatile_load_waits(interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(interpreted.time, "sleep", waits.append)
    monkeypatch.setattr(
        interpreted, "_interpreter", lambda: interpreted._Interpreter(interpreter, None, lambda *given: given, None)
    )
    interpreted.patient()
    load = interpreter.InterpreterBuilder.create_masked_load
    assert load("builder", "pointers", False) == ("builder", "pointers", False) and not waits
    load("builder", "pointers", True)
    assert waits == [interpreted._POLL_S]


def test_without_numpy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "triton.runtime.interpreter", raising=False)
    interpreted._interpreter.cache_clear()
    with pytest.raises(PreflightError, match="pip install numpy"):
        interpreted.like_gpus()
