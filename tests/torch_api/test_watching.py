"""The private torch API the sentinel needs: each test fails when torch moves it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpcompile.torch_api import hooks as torch_hooks
from tpcompile.torch_api import watching

Seen = list[tuple[bool, Any]]


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def tripled(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 3


def broken(x: Tensor) -> Tensor:
    return tripled(x) + 1


def target_of(frame: FrameType) -> Any:
    """The compiled callable whose own frame is below `frame`; None for a frame further in."""
    call = watching.entered(frame)
    return None if call is None else call.target


@pytest.fixture
def lookups() -> Iterator[Seen]:
    """Every guard lookup: hit, and the compiled callable it was for."""
    torch.compiler.reset()
    seen: Seen = []

    def hook(hit: bool, frame: FrameType | None = None) -> bool:
        seen.append((hit, target_of(frame or sys._getframe(1))))
        return hit

    with torch_hooks.guard_lookups(hook):
        yield seen
    torch.compiler.reset()


@pytest.fixture
def compiles() -> Iterator[list[tuple[str, str, Any]]]:
    """Every callback: start or end, its kind, and the compiled callable on the stack at a start."""
    seen: list[tuple[str, str, Any]] = []

    def start(kind: str, compile_id: str) -> None:
        seen.append(("start", kind, target_of(sys._getframe(1))))

    listener = torch_hooks.CompileListener(start, lambda kind, compile_id: seen.append(("end", kind, None)))
    listener.ensure()
    yield seen
    listener.close()


def test_hits_and_misses_are_reported_with_the_callable_they_are_for(lookups: Seen) -> None:
    compiled = torch.compile(broken, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    assert lookups == []  # nothing compiled yet, nothing to look up
    compiled(torch.ones(3))
    assert lookups[0] == (True, broken)
    assert lookups[1:] and all(found == (True, None) for found in lookups[1:])
    lookups.clear()
    compiled(torch.ones(4))
    assert lookups[0] == (False, broken)


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_a_module_is_reported_as_the_module(lookups: Seen, way: str) -> None:
    module = Sine()
    called: Any = torch.compile(module, backend="eager") if way == "torch.compile" else module
    if way == "module.compile":
        module.compile(backend="eager")
    called(torch.ones(3))
    called(torch.ones(3))
    assert lookups == [(True, module)]


def test_a_module_with_a_hook_that_is_not_compiled_is_reported_as_the_module(lookups: Seen) -> None:
    module = Sine()
    module.register_forward_pre_hook(torch.compiler.disable(lambda module, inputs: None))  # FSDP's are such hooks
    module.compile(backend="eager")
    module(torch.ones(3))
    lookups.clear()
    module(torch.ones(3))
    assert lookups == [(True, module)]


def test_a_compile_is_reported_with_its_callable_before_and_after(compiles: list[tuple[str, str, Any]]) -> None:
    compiled = torch.compile(Sine(), backend="eager")
    compiled(torch.ones(3))
    assert [(when, kind) for when, kind, _ in compiles] == [("start", "dynamo"), ("end", "dynamo")]
    assert isinstance(compiles[0][2], Sine)


@pytest.mark.slow
def test_a_lazy_backward_compile_is_reported_as_one(
    compiles: list[tuple[str, str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # a cache hit has no lazy backward
    compiled = torch.compile(torch.mm, backend="inductor")  # no kernel of Inductor's own: no C++ compiler
    compiled(torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)).sum().backward()
    assert ("start", "lazy_backward", None) in [(when, kind, None) for when, kind, _ in compiles]


def test_listening_goes_on_after_a_reset_of_the_compiler(compiles: list[tuple[str, str, Any]]) -> None:
    heard: list[str] = []
    listener = torch_hooks.CompileListener(lambda kind, _: heard.append(kind), lambda kind, _: None)
    listener.ensure()
    torch.compiler.reset()
    listener.ensure()
    listener.ensure()  # a second time changes nothing
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    listener.close()
    assert heard == ["dynamo"]


def test_dynamo_is_seen_on_the_stack_while_it_compiles_only() -> None:
    seen: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(watching.is_in_dynamo(sys._getframe()))
        return graph

    compiled = torch.compile(lambda x: x * 5, backend=backend)
    compiled(torch.ones(3))
    assert seen == [True]
    assert not watching.is_in_dynamo(sys._getframe())


@pytest.mark.parametrize("way", ["function", "torch.compile", "module.compile", "eager module"])
def test_calls_of_every_kind_of_target_can_be_wrapped(way: str) -> None:
    calls: list[str] = []

    def wrap(call: Any) -> Any:
        def counted(*args: Any) -> Any:
            calls.append(way)
            return call(*args)

        return counted

    module = Sine()
    target: Any = {"function": lambda x: x.sin(), "torch.compile": torch.compile(module, backend="eager")}.get(
        way, module
    )
    if way == "module.compile":
        module.compile(backend="eager")
    wrapped = watching.wrap_calls(target, wrap)
    assert torch.equal(wrapped(torch.ones(3)), torch.ones(3).sin())
    assert calls == [way]
    assert way == "function" or wrapped is target


def failing_backend(graph: Any, inputs: Any) -> Any:
    raise ImportError("libkernels.so")


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


@pytest.mark.parametrize(
    ("program", "options"),
    [(torch.sin, {"backend": failing_backend}), (breaks, {"backend": "eager", "fullgraph": True})],
)
def test_an_exception_that_a_compile_raised_is_of_the_compiler(program: Any, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    with pytest.raises(Exception) as raised:
        torch.compile(program, **options)(torch.ones(2))
    assert watching.is_of_compiler(raised.value)


def of_wrong_shape(x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, torch.ones(3, 3))


def test_the_traced_program_is_known_where_torch_itself_raised() -> None:
    torch.compiler.reset()
    with pytest.raises(Exception) as raised:
        torch.compile(of_wrong_shape, backend="eager")(torch.ones(2))
    assert "of_wrong_shape" in [frame.name for frame in watching.traced_stack(raised.value)]
    assert watching.traced_stack(ValueError("a bug")) == []


def raises(x: Tensor) -> Tensor:
    raise ValueError("a bug")


def test_an_exception_of_the_program_is_not_of_the_compiler() -> None:
    with pytest.raises(ValueError, match="a bug") as raised:
        raises(torch.ones(2))
    assert not watching.is_of_compiler(raised.value)


def test_hooks_of_a_compiled_callable_are_called_around_each_of_its_calls() -> None:
    calls: list[Any] = []

    def keep(hit: bool, frame: FrameType | None = None) -> bool:
        call = watching.entered(frame or sys._getframe(1))
        if call is not None:
            calls.append((call.function, call.context))
        return hit

    torch.compiler.reset()
    compiled = torch.compile(tripled, backend="eager")
    heard: list[str] = []

    def begins() -> Any:
        heard.append("begins")
        return lambda: heard.append("ends")

    with torch_hooks.guard_lookups(keep):
        compiled(torch.ones(3))
        compiled(torch.ones(3))
    ((function, context),) = calls
    assert function is tripled
    hooks = watching.entry_hooks(context)
    hooks.append(begins)
    compiled(torch.ones(3))
    assert heard == ["begins", "ends"]


def test_what_gloo_recorded_is_known_beside_what_nccl_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs may run a job on gloo, which has a recorder of its own."""
    core = torch._C._distributed_c10d
    dumps = {
        "_dump_nccl_trace": {"entries": [{"n": 1}], "pg_status": {0: "nccl"}},
        "_dump_fr_trace": {"entries": [{"n": 2}]},
    }
    for name, dump in dumps.items():
        monkeypatch.setattr(core, name, lambda dump=dump: pickle.dumps(dump), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert watching.recorded_collectives() == {"entries": [{"n": 1}, {"n": 2}], "pg_status": {0: "nccl"}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert watching.recorded_collectives() == {"entries": [{"n": 2}]}
