"""A compiled callable reports that a call begins: counted as from the stack, also after Dynamo skips code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tpcompile.recording import CaptureSession
from tpcompile.sentinel.hooks import Hooks
from tpcompile.sentinel.progress import Progress
from tpcompile.torch_api import watching

pytestmark = pytest.mark.usefixtures("fresh_compiler")
IGNORED: dict[str, Any] = {
    "on": lambda event: None,
    "note": lambda event, compile_id: None,
    "say_raising": lambda: None,
    "on_compile": lambda record: None,
}
"""What the hooks tell, and these tests do not ask."""


@pytest.fixture
def progress() -> Iterator[Progress]:
    """The counts of this process, watched."""
    progress = Progress(lambda found: None)
    progress.is_active = True
    with CaptureSession(count_regions=False) as session:
        hooks = Hooks(0, session, progress, **IGNORED)
        hooks.install()
        yield progress
        hooks.remove()


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Layers(nn.Module):
    """A loop of layers; with `debug` its graph breaks in that loop, and Dynamo skips `forward` from then on."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.debug = debug

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.debug:
                torch._dynamo.graph_break()
        return x


def calls_of(progress: Progress) -> dict[str, int]:
    """Function -> its calls."""
    return {name.split()[0].rpartition(".")[2]: calls for name, calls in progress.calls().items()}


def doubled(x: Tensor) -> Tensor:
    return x * 2


def tripled(x: Tensor) -> Tensor:
    return x * 3


def test_a_call_of_compiled_code_is_counted_without_a_look_at_the_stack(progress: Progress) -> None:
    compiled = torch.compile(doubled, backend="eager")
    for _ in range(2):
        compiled(torch.ones(3))
    with mock.patch.object(watching, "entered", side_effect=AssertionError("looks at the stack")):
        for _ in range(5):
            compiled(torch.ones(3))
    assert calls_of(progress) == {"doubled": 7}


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_calls_of_a_module_are_counted_once_each(progress: Progress, way: str) -> None:
    module = Layers(debug=False)
    called: Any = torch.compile(module, backend="eager") if way == "torch.compile" else module
    if way == "module.compile":
        module.compile(backend="eager")
    for _ in range(5):
        called(torch.ones(3))
    assert calls_of(progress) == {"forward": 5}


def test_code_that_dynamo_skips_meanwhile_is_not_counted_as_compiled(progress: Progress) -> None:
    whole, broken = Layers(debug=False), Layers(debug=True)
    first, second = torch.compile(whole, backend="eager"), torch.compile(broken, backend="eager")
    for _ in range(3):
        first(torch.ones(3))
    second(torch.ones(3))  # Dynamo skips the code of both from here on, and compiles the layers
    before = [region.call for region in progress.regions.values()]
    for _ in range(3):
        first(torch.ones(3))
    assert [region.call for region in progress.regions.values()] == before


def test_a_recompile_is_at_the_call_that_made_it(progress: Progress) -> None:
    compiled = torch.compile(doubled, backend="eager", dynamic=False)
    for size in (3, 3, 3, 4, 4, 3):
        compiled(torch.ones(size))
    (region,) = progress.regions.values()
    assert list(region.compiled) == [(1, 0), (4, 0)]
    assert region.call == 6


def test_functions_that_share_a_context_of_torch_are_counted_apart(progress: Progress) -> None:
    context = torch._dynamo.optimize("eager")
    first, second = context(doubled), context(tripled)
    for _ in range(3):
        first(torch.ones(3))
        second(torch.ones(3))
    assert calls_of(progress) == {"doubled": 3, "tripled": 3}


def test_a_compiled_callable_that_calls_others_leaves_each_its_calls(progress: Progress) -> None:
    inner = torch.compile(doubled, backend="eager")
    hidden = torch.compiler.disable(lambda x: inner(x))

    def outer(x: Tensor) -> Tensor:
        return tripled(hidden(x))

    compiled = torch.compile(outer, backend="eager")
    for _ in range(4):
        compiled(torch.ones(3))
    counted = calls_of(progress)
    assert (counted["outer"], counted["doubled"]) == (4, 4)


def test_calls_that_begin_on_two_threads_at_once_are_counted_each(progress: Progress) -> None:
    one, other = torch._dynamo.optimize("eager"), torch._dynamo.optimize("eager")
    first, second = one(doubled), other(tripled)
    for _ in range(3):
        first(torch.ones(3))
        second(torch.ones(3))
    has_begun, may_go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: second(torch.ones(3)))

    def wait_for_the_second() -> Any:
        thread.start()
        assert has_begun.wait(timeout=60)
        return may_go_on.set

    def let_the_first_go_on() -> Any:
        has_begun.set()
        assert may_go_on.wait(timeout=60)
        return lambda: None

    # After ours: both calls have begun before a frame of either is looked up.
    one.enter_exit_hooks.append(wait_for_the_second)
    other.enter_exit_hooks.append(let_the_first_go_on)
    first(torch.ones(3))
    thread.join()
    assert calls_of(progress) == {"doubled": 4, "tripled": 4}


def test_nothing_is_left_in_torch_when_it_ends() -> None:
    context = torch._dynamo.optimize("eager")
    compiled, before = context(doubled), list(context.enter_exit_hooks)
    progress = Progress(lambda found: None)
    progress.is_active = True
    with CaptureSession(count_regions=False) as session:
        hooks = Hooks(0, session, progress, **IGNORED)
        hooks.install()
        for _ in range(3):
            compiled(torch.ones(3))
        assert len(context.enter_exit_hooks) == len(before) + 1
        hooks.remove()
    assert context.enter_exit_hooks == before
    compiled(torch.ones(3))
    assert calls_of(progress) == {"doubled": 3}
