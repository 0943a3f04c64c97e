"""Triton's interpreter: what is changed in it is there, and without numpy the error says what to install."""

from __future__ import annotations

import sys

import pytest
import torch

from tpcompile.errors import PreflightError
from tpcompile.torch_api import interpreted

tl = pytest.importorskip("triton.language")
np = pytest.importorskip("numpy")


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch):
    """Triton's interpreter, as it was again after the test."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_masked_load", builder.create_masked_load)
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", interpreter.InterpretedFunction.run)
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
        interpreted,
        "_interpreter",
        lambda: interpreted._Interpreter(interpreter, None, lambda *given: given, None, None),
    )
    interpreted.patient()
    load = interpreter.InterpreterBuilder.create_masked_load
    assert load("builder", "pointers", False) == ("builder", "pointers", False) and not waits
    load("builder", "pointers", True)
    assert waits == [interpreted._POLL_S]


def twice(x):
    return x + x


def four_times(place):
    tl.store(place, twice(twice(tl.load(place))))


def patches_of_a_launch(interpreter, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of which functions a launch of `four_times` patches the language; its result is right, and all is restored."""
    patched = []

    def patch(fn):
        patched.append(fn.__name__)
        return original(fn)

    original = interpreter._patch_lang
    monkeypatch.setattr(interpreter, "_patch_lang", patch)
    monkeypatch.setitem(globals(), "twice", interpreter.InterpretedFunction(twice))
    load, place = tl.load, torch.ones(1)
    interpreter.InterpretedFunction(four_times).run(place, grid=(1,), warmup=False)
    assert place.item() == 4 and tl.load is load
    return patched


def test_a_launch_patches_the_language_once(interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    given = interpreted._interpreter()
    patched = []
    counting = given._replace(patch_lang=lambda fn: patched.append(fn.__name__) or given.patch_lang(fn))
    monkeypatch.setattr(interpreted, "_interpreter", lambda: counting)
    interpreted.like_gpus()
    assert patches_of_a_launch(interpreter, monkeypatch) == ["four_times", "twice", "twice"]
    assert patched == ["four_times"]


def test_triton_patches_it_at_each_call(interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what `like_gpus` does about it can go."""
    assert patches_of_a_launch(interpreter, monkeypatch) == ["four_times", "twice", "twice"]


def test_a_function_of_a_module_that_has_the_core_alone_is_patched_in_a_launch(interpreter, monkeypatch) -> None:
    monkeypatch.setattr(interpreted, "_patched_in_launch", {tl})
    knows_core, knows_all = (eval("lambda: None", {"module": module}) for module in (tl.core, tl))
    scope = interpreted._patch_once(knows_core)
    assert scope is not None and interpreted._patch_once(knows_all) is None
    assert interpreted._patch_once(knows_core) is None
    scope.restore()


def test_a_function_that_sees_no_language_is_left_to_triton_which_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "_patched_in_launch", {tl})
    with pytest.raises(AssertionError, match=r"triton\.language"):
        interpreted._patch_once(eval("lambda: None", {"__builtins__": {}}))


def test_without_numpy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "triton.runtime.interpreter", raising=False)
    interpreted._interpreter.cache_clear()
    with pytest.raises(PreflightError, match="numpy"):
        interpreted.like_gpus()


def test_a_kernel_is_read_once_until_it_is_said_that_its_code_has_changed(
    interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, function = interpreter.InterpretedFunction(twice), twice
    monkeypatch.setitem(globals(), "twice", kernel)
    interpreted.rewrite([function, four_times])
    known = interpreter.InterpretedFunction.rewritten_fn[function]
    assert kernel.rewrite() is known
    interpreted.forget(function)
    assert kernel.rewrite() is not known
    interpreted.forget(function)
