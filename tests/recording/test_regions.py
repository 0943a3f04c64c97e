"""Regions entered per call, counted in real compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.digests.split_regions import region_check
from tpcompile.evidence.records import RankDigest, RegionCount, Status
from tpcompile.recording import CaptureSession
from tpcompile.torch_api import compiler as compat

pytestmark = pytest.mark.usefixtures("fresh_compiler")

STEP = "step"


class Block(nn.Module):
    """One layer; the debug variant breaks the graph."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self.linear, self.debug = nn.Linear(4, 4), debug

    def forward(self, x: Tensor) -> Tensor:
        """x -> relu(linear(x))."""
        y = self.linear(x)
        if self.debug:
            torch._dynamo.graph_break()
        return torch.relu(y)


class Stack(nn.Module):
    """Blocks in a loop."""

    def __init__(self, *, debug: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(debug=debug) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def two_regions(x: Tensor) -> Tensor:
    """A break outside of a loop."""
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def captured(program: Callable[..., Any], calls: int = 3) -> tuple[tuple[RegionCount, ...], RankDigest]:
    """Counts of `calls` calls, and this rank's digest."""
    with CaptureSession() as session, session.phase(STEP):
        for _ in range(calls):
            program(torch.ones(2, 4))
    return session.region_counts(), digest_rank(session.record(rank=0, world_size=1))


def line_of(function: Callable[..., Any], text: str) -> int:
    """Number of the line in this file that holds `text`, inside of `function`."""
    code = function.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if n > code.co_firstlineno and text in line)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_healthy_module_enters_one_region_per_call(backend: str) -> None:
    (count,), digest = captured(torch.compile(Stack(), backend=backend))
    assert (count.calls, count.entered, count.most, count.runs_at) == (3, 3, 1, None)
    assert count.target.function == "Stack.forward"
    assert region_check("", [digest], phases=[STEP]).status == Status.PASS


def test_a_class_whose_code_was_skipped_earlier_enters_a_region_per_block() -> None:
    torch.compile(Stack(debug=True), backend="eager")(torch.ones(2, 4))
    (count,), digest = captured(torch.compile(Stack(), backend="eager", fullgraph=True))
    assert (count.calls, count.entered, count.most) == (3, 9, 3)
    check = region_check("", [digest], phases=[STEP])
    assert check.status == Status.FAIL and check.ranks == (0,)
    broke_at = line_of(Block.forward, "graph_break")
    assert check.line is not None and check.line.line == broke_at
    (split,) = digest.splits
    assert (split.name, split.skipped is not None) == ("Stack.forward", True)
    assert "Stack.forward" in check.observed and f":{broke_at}" in check.observed
    assert any("fullgraph=True" in detail for detail in check.details)
    assert digest.splits[0].pieces[0].function == "forward"


def test_a_reset_after_the_call_that_broke_its_graph_makes_one_region_of_it() -> None:
    """What the report says to do; the other way, without the break, is the healthy module above."""
    torch.compile(Stack(debug=True), backend="eager")(torch.ones(2, 4))
    torch.compiler.reset()
    (count,), digest = captured(torch.compile(Stack(), backend="eager"))
    assert count.most == 1
    assert region_check("", [digest], phases=[STEP]).status == Status.PASS


def test_blocks_that_were_compiled_before_the_capture_are_counted_too() -> None:
    torch.compile(Stack(debug=True), backend="eager")(torch.ones(2, 4))
    program = torch.compile(Stack(), backend="eager")
    program(torch.ones(2, 4))
    (count,), digest = captured(program, calls=1)
    assert count.most == 3
    assert region_check("", [digest], phases=[STEP]).status == Status.FAIL


def test_a_graph_break_is_two_regions_in_one_call() -> None:
    (count,), _ = captured(torch.compile(two_regions, backend="eager"))
    assert (count.calls, count.entered, count.most) == (3, 6, 2)
    assert count.runs_at is not None and count.runs_at.function == "two_regions"


def test_two_compiled_callables_are_counted_apart() -> None:
    first, second = torch.compile(Block(debug=False), backend="eager"), torch.compile(two_regions, backend="eager")

    def program(x: Tensor) -> None:
        for _ in range(2):
            second(first(x))

    counts, _ = captured(program, calls=1)
    assert {(c.target.function, c.calls, c.most) for c in counts} == {("Block.forward", 2, 1), ("two_regions", 2, 2)}


def test_a_module_with_a_forward_hook_enters_one_region_per_call() -> None:
    module = Stack()
    module.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    (count,), _ = captured(torch.compile(module, backend="eager"))
    assert count.most == 1


def test_a_hook_on_the_compiled_module_itself_is_a_region_of_its_own_and_red() -> None:
    module = Block(debug=False)
    module.register_forward_hook(lambda module, args, output: output.sin() * 2)
    (count,), digest = captured(torch.compile(module, backend="eager", fullgraph=True))
    assert (count.most, count.runs_at) == (2, None)
    check = region_check("", [digest], phases=[STEP])
    assert check.status == Status.FAIL and digest.splits[0].is_in_library
    assert check.line is not None and check.line.line == Block.forward.__code__.co_firstlineno
    assert "<lambda>" in {piece.function for piece in digest.splits[0].pieces}


def test_a_function_that_calls_the_module_takes_its_hooks_in() -> None:
    module = Block(debug=False)
    module.register_forward_hook(lambda module, args, output: output.sin() * 2)
    (count,), digest = captured(torch.compile(lambda x: module(x), backend="eager", fullgraph=True))
    assert count.most == 1
    assert region_check("", [digest], phases=[STEP]).status == Status.PASS


def test_a_checkpointed_function_enters_one_region_per_call() -> None:
    block = Block(debug=False)

    def step(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) + 1

    (count,), _ = captured(torch.compile(step, backend="aot_eager"))
    assert count.most == 1


def test_a_hook_that_was_there_before_goes_on_working_and_comes_back() -> None:
    seen: list[bool] = []

    def theirs(hit: bool) -> bool:
        seen.append(hit)
        return hit

    import torch._C._dynamo.eval_frame as eval_frame

    eval_frame.set_guard_complete_hook(theirs)
    try:
        captured(torch.compile(Block(debug=False), backend="eager"))
        assert seen == [True, True]
        assert eval_frame.set_guard_complete_hook(None) is theirs
    finally:
        eval_frame.set_guard_complete_hook(None)


def test_counting_can_be_switched_off() -> None:
    with CaptureSession(count_regions=False) as session, session.phase(STEP):
        torch.compile(Block(debug=False), backend="eager")(torch.ones(2, 4))
    digest = digest_rank(session.record(rank=0, world_size=1))
    assert session.region_counts() == ()
    assert region_check("", [digest], phases=[STEP]).status == Status.SKIPPED


def test_failed_frames_are_known_without_a_capture() -> None:
    torch.compile(Stack(debug=True), backend="eager")(torch.ones(2, 4))
    frame = next(f for f in compat.failed_frames() if f.line.line == Stack.forward.__code__.co_firstlineno)
    assert frame.line.function == "forward"
    assert frame.broke_at is not None and frame.broke_at.line == line_of(Block.forward, "graph_break")


def once(x: Tensor) -> Tensor:
    return x.sin()


def twice(x: Tensor) -> Tensor:
    return x.cos()


def test_a_stack_is_known_of_a_line_that_was_traced_from_one_place_only() -> None:
    def program(x: Tensor) -> Tensor:
        y = twice(once(x))
        return twice(y)

    with CaptureSession() as session:
        torch.compile(program, backend="eager")(torch.ones(4))
    (compile_,) = session.record(rank=0, world_size=1).compiles
    lines = {node.line.function: node.line for node in compile_.dynamo_nodes if node.line is not None}
    callers = compile_.callers(lines["once"])
    assert callers is not None
    assert [line.function for line in callers] == ["program"]
    assert compile_.callers(lines["twice"]) is None
