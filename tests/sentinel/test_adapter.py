"""The private torch API the sentinel needs: each test fails when torch moves it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.sentinel import adapter, flight
from tpcompile.testing.ranks import run_on_ranks

Seen = list[tuple[bool, Any]]


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def tripled(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 3


def broken(x: Tensor) -> Tensor:
    return tripled(x) + 1


@pytest.fixture
def lookups() -> Iterator[Seen]:
    """Every guard lookup: hit, and the compiled callable it was for."""
    torch.compiler.reset()
    seen: Seen = []

    def hook(hit: bool) -> bool:
        seen.append((hit, adapter.entered_callable(sys._getframe(1))))
        return hit

    before = adapter.set_guard_hook(hook)
    yield seen
    adapter.set_guard_hook(before)
    torch.compiler.reset()


@pytest.fixture
def compiles() -> Iterator[list[tuple[str, str, Any]]]:
    """Every callback: start or end, its kind, and the compiled callable on the stack at a start."""
    seen: list[tuple[str, str, Any]] = []

    def start(kind: str, compile_id: str) -> None:
        seen.append(("start", kind, adapter.entered_callable(sys._getframe(1))))

    listener = adapter.CompileListener(start, lambda kind, compile_id: seen.append(("end", kind, None)))
    listener.ensure()
    yield seen
    listener.close()


def test_hits_and_misses_are_told_with_the_callable_they_are_for(lookups: Seen) -> None:
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
def test_a_module_is_told_as_the_module(lookups: Seen, way: str) -> None:
    module = Sine()
    called: Any = torch.compile(module, backend="eager") if way == "torch.compile" else module
    if way == "module.compile":
        module.compile(backend="eager")
    called(torch.ones(3))
    called(torch.ones(3))
    assert lookups == [(True, module)]


def test_a_compile_is_told_with_its_callable_before_and_after(compiles: list[tuple[str, str, Any]]) -> None:
    compiled = torch.compile(Sine(), backend="eager")
    compiled(torch.ones(3))
    assert [(when, kind) for when, kind, _ in compiles] == [("start", "dynamo"), ("end", "dynamo")]
    assert isinstance(compiles[0][2], Sine)


def test_a_lazy_backward_compile_is_told_as_one(
    compiles: list[tuple[str, str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # a cache hit has no lazy backward
    compiled = torch.compile(lambda x: (x * 2).sin(), backend="inductor")
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    assert ("start", "lazy_backward", None) in [(when, kind, None) for when, kind, _ in compiles]


def test_listening_goes_on_after_a_reset_of_the_compiler(compiles: list[tuple[str, str, Any]]) -> None:
    heard: list[str] = []
    listener = adapter.CompileListener(lambda kind, _: heard.append(kind), lambda kind, _: None)
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
        seen.append(adapter.is_in_dynamo(sys._getframe()))
        return graph

    compiled = torch.compile(lambda x: x * 5, backend=backend)
    compiled(torch.ones(3))
    assert seen == [True]
    assert not adapter.is_in_dynamo(sys._getframe())


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
    wrapped = adapter.wrap_calls(target, wrap)
    assert torch.equal(wrapped(torch.ones(3)), torch.ones(3).sin())
    assert calls == [way]
    assert way == "function" or wrapped is target


def reduce_twice() -> list[dict[str, Any]]:
    group = dist.new_group([0, 1], group_desc="second")
    dist.all_reduce(torch.ones(2, 3))
    dist.all_reduce(torch.ones(5), group=group)  # the line to be named
    names = adapter.group_names()
    return [i.model_dump() | {"known": i.group in names} for i in flight.recorded()]


def test_the_flight_recorder_tells_group_number_op_sizes_and_the_users_line() -> None:
    for issued in run_on_ranks(reduce_twice):
        first, second = issued
        assert (first["seq"], first["op"], first["sizes"], first["is_done"]) == (1, "all_reduce", "2x3", True)
        assert second["group"].endswith("second") and second["known"] and first["known"]
        assert second["line"]["code"].endswith("# the line to be named")


def blocked_rank() -> tuple[bool, str]:
    """Rank 0 waits in a collective; a second thread looks at it."""
    found: list[tuple[bool, str]] = []
    main = threading.get_ident()

    def look() -> None:
        for _ in range(2000):
            frame = adapter.main_thread_frame(main)
            if flight.is_blocked(frame):
                found.append((True, flight.user_stack(frame)[-1].code))
                break
            threading.Event().wait(0.005)
        store.set("looked", "yes")

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        thread = threading.Thread(target=look)
        thread.start()
        dist.all_reduce(torch.ones(3))  # waits here
        thread.join()
        return found[0] if found else (False, "")
    store.wait(["looked"])
    dist.all_reduce(torch.ones(3))
    return (False, "")


def test_a_thread_in_a_collective_is_seen_as_blocked_at_the_users_line() -> None:
    assert run_on_ranks(blocked_rank)[0] == (True, "dist.all_reduce(torch.ones(3))  # waits here")


def test_a_thread_in_the_users_own_code_is_not_blocked() -> None:
    assert not flight.is_blocked(sys._getframe())
