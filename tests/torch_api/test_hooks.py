"""Every listener is called for compiles and guard lookups, and nothing stays registered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
import torch._C._dynamo.eval_frame as eval_frame

from tpcompile.torch_api import hooks as torch_hooks

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compile_and_run() -> None:
    torch.compile(double, backend="eager")(torch.ones(3))


@pytest.fixture
def hook_of_another() -> Iterator[list[bool]]:
    """A hook that was there before ours, and what it heard."""
    heard: list[bool] = []

    def theirs(hit: bool) -> bool:
        heard.append(hit)
        return hit

    eval_frame.set_guard_complete_hook(theirs)
    yield heard
    assert eval_frame.set_guard_complete_hook(None) is theirs


def test_callbacks_fire_around_each_compile_of_a_frame_and_before_its_code_runs() -> None:
    seen: list[tuple[str, str]] = []
    x = torch.ones(3)

    def ended(compile_id: str) -> None:
        seen.append(("end", compile_id))
        seen.append(("x", str(x.tolist())))

    with torch_hooks.compile_callbacks(lambda compile_id: seen.append(("start", compile_id)), ended):
        compiled = torch.compile(lambda t: t.add_(1), backend="eager")
        compiled(x)
        compiled(x)
    assert seen == [("start", "0/0"), ("end", "0/0"), ("x", "[1.0, 1.0, 1.0]")]
    assert x.tolist() == [3, 3, 3]


def test_a_lazily_compiled_backward_calls_no_callback() -> None:
    seen: list[str] = []
    x = torch.ones(3, requires_grad=True)
    with torch_hooks.compile_callbacks(seen.append, seen.append):
        y = torch.compile(double, backend="aot_eager")(x)
        before = len(seen)
        y.sum().backward()
    assert (before, len(seen)) == (2, 2)


def test_callbacks_are_removed_even_after_a_reset() -> None:
    seen: list[str] = []
    with torch_hooks.compile_callbacks(seen.append, seen.append):
        torch.compiler.reset()
    compile_and_run()
    assert seen == []


def test_an_exception_at_the_end_of_a_compile_reaches_the_caller_and_leaves_nothing_pending() -> None:
    def fail(_: str) -> None:
        raise RuntimeError("diverged")

    with torch_hooks.compile_callbacks(lambda _: None, fail), pytest.raises(RuntimeError, match="diverged"):
        compile_and_run()
    torch.compiler.reset()  # raises while a compile is pending
    seen: list[str] = []
    with torch_hooks.compile_callbacks(seen.append, seen.append):
        compile_and_run()
    assert len(seen) == 2


def listener(heard: list[tuple[str, bool, str]], name: str) -> torch_hooks.Lookup:
    def hear(hit: bool, frame: FrameType | None = None) -> bool:
        heard.append((name, hit, (frame or sys._getframe(1)).f_code.co_name))
        return hit

    return hear


def steady(function: Callable[[], object]) -> None:
    function()
    function()


def test_one_listener_is_called_by_dynamo_itself_and_two_by_the_dispatcher() -> None:
    heard: list[tuple[str, bool, str]] = []
    first, second = listener(heard, "first"), listener(heard, "second")
    with torch_hooks.guard_lookups(first):
        assert eval_frame.set_guard_complete_hook(first) is first
        steady(compile_and_run)
        with torch_hooks.guard_lookups(second):
            compile_and_run()
        compile_and_run()
    compile_and_run()
    assert heard == [(name, True, "compile_wrapper") for name in ("first", "first", "second", "first")]
    assert eval_frame.set_guard_complete_hook(None) is None


def test_a_hook_that_is_there_already_goes_on_working(hook_of_another: list[bool]) -> None:
    heard: list[tuple[str, bool, str]] = []
    with torch_hooks.guard_lookups(listener(heard, "ours")):
        steady(compile_and_run)
    compile_and_run()
    assert (len(heard), len(hook_of_another)) == (1, 2)
    theirs = eval_frame.set_guard_complete_hook(None)
    with torch_hooks.guard_lookups(listener(heard, "ours")):
        compile_and_run()
    assert len(hook_of_another) == 2, "theirs was removed meanwhile"
    eval_frame.set_guard_complete_hook(theirs)


def test_a_hook_that_comes_later_stays() -> None:
    ours: list[tuple[str, bool, str]] = []
    before: list[object] = []

    def theirs(hit: bool) -> bool:
        return hit

    with torch_hooks.guard_lookups(listener(ours, "ours")):
        before.append(eval_frame.set_guard_complete_hook(theirs))
    assert eval_frame.set_guard_complete_hook(None) is theirs
    assert len(before) == 1
    with torch_hooks.guard_lookups(listener(ours, "ours")):
        steady(compile_and_run)
    assert len(ours) == 1
