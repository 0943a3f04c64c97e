"""recording/flow: the lines of user code that a process executes, in a ring that outlives it."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import ROOT
from tpcompile.evidence.text.lines import is_packaged
from tpcompile.evidence.timeline.flow import LINE_BITS, LINE_MASK, Flow, Kind, until
from tpcompile.recording import flow as module
from tpcompile.recording import ring
from tpcompile.recording.flow import IS_POSSIBLE, FlowRecorder
from tpcompile.recording.ring import flow_left

needs_monitoring = pytest.mark.skipif(not IS_POSSIBLE, reason="Python 3.12 has sys.monitoring")


def recorded(program: Callable[[FlowRecorder], Any], name: str, **settings: Any) -> Flow:
    recorder = FlowRecorder(**settings)
    assert recorder.start(name, by_settrace=True) == ""
    try:
        program(recorder)
        found = recorder.flow()
    finally:
        recorder.stop()
    assert found is not None
    return found


def lines(flow: Flow, function: str) -> list[tuple[Kind, int]]:
    """Steps of a function, lines counted from its first."""
    codes = {number: code for number, code in enumerate(flow.codes) if code.function.endswith(function)}
    steps = [
        (codes[number], Kind(packed >> LINE_BITS), packed & LINE_MASK)
        for number, packed in flow.steps()
        if number in codes and packed >> LINE_BITS != Kind.VALUE
    ]
    return [(kind, line - code.line if kind in (Kind.LINE, Kind.START) else line) for code, kind, line in steps]


def chosen(is_first: bool) -> int:
    if is_first:
        return 1
    return 2


def generated() -> Iterator[int]:
    yield 1
    yield 2


@pytest.mark.usefixtures("callbacks")
def test_each_line_start_and_return_of_a_function_is_a_step(name: str) -> None:
    flow = recorded(lambda _: [chosen(True), chosen(False)], name)
    assert lines(flow, "chosen") == [
        (Kind.START, 0), (Kind.LINE, 1), (Kind.LINE, 2), (Kind.RETURN, 0),
        (Kind.START, 0), (Kind.LINE, 1), (Kind.LINE, 3), (Kind.RETURN, 0),
    ]  # fmt: skip
    assert flow.num_before == 0


def raising(steps: int) -> None:
    for step in range(steps):
        if step == 2:
            int("not a number")


def cleaning_up() -> None:
    try:
        raising(4)
    finally:
        chosen(True)


def test_what_is_executed_on_the_way_out_of_an_exception_is_left_out(name: str) -> None:
    flow = recorded(lambda _: suppressed(cleaning_up), name)
    assert lines(flow, "chosen")
    with pytest.raises(ValueError) as error:
        cleaning_up()
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.value.__traceback__)][::-1]
    kept = until(flow, places)
    assert not lines(kept, "chosen")
    assert lines(kept, "raising")[-1] == (Kind.LINE, 3)
    assert len(lines(kept, "raising")) >= len(lines(flow, "raising")) - 1, "sys.settrace calls leaving it a return"
    assert until(flow, [("/elsewhere.py", 3)]) == flow


def with_callbacks() -> None:
    """A library calls functions of the program, and then raises: the line of the program is the last of its own."""
    try:
        sorted([1, 2, "x"], key=noticed)
    finally:
        chosen(True)


def noticed(value: object) -> object:
    if value == "x":
        return value
    return 0


def test_callbacks_of_the_line_that_raised_are_kept(name: str) -> None:
    """What decided the fate of a training loop is inside of the one line that runs it."""
    flow = recorded(lambda _: suppressed(with_callbacks), name)
    with pytest.raises(TypeError) as error:
        with_callbacks()
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.value.__traceback__)][::-1]
    kept = until(flow, places)
    assert lines(kept, "noticed") == lines(flow, "noticed") != []
    assert lines(flow, "chosen") and not lines(kept, "chosen")


def suppressed(program: Callable[[], None]) -> None:
    with suppress(ValueError, TypeError):
        program()


@pytest.mark.usefixtures("callbacks")
def test_a_generator_that_goes_on_does_not_start_again(name: str) -> None:
    flow = recorded(lambda _: list(generated()), name)
    assert [kind for kind, _ in lines(flow, "generated")] == [Kind.START, Kind.LINE, Kind.LINE, Kind.RETURN]


@pytest.mark.usefixtures("callbacks")
def test_code_of_packages_is_left_out_unless_it_is_followed(name: str) -> None:
    import pytest as installed

    def program(_: FlowRecorder) -> None:
        installed.approx(1.0) == 1.0  # noqa: B015

    def files(**settings: Any) -> set[str]:
        return {code.file for code in recorded(program, secrets.token_hex(8), **settings).codes}

    assert __file__ in files()
    assert not any(map(is_packaged, files()))
    assert any("/_pytest/" in file for file in files(follow=["_pytest"]))


@pytest.mark.usefixtures("callbacks")
def test_calls_of_regions_are_steps_and_nothing_is_one_while_it_is_paused(name: str) -> None:
    def program(recorder: FlowRecorder) -> None:
        recorder.mark("step train.py:3", 7)
        recorder.pause(True)
        chosen(True)
        recorder.mark("step train.py:3", 8)
        recorder.pause(False)
        recorder.mark("step train.py:3", 9)

    flow = recorded(program, name)
    assert lines(flow, "train.py:3") == [(Kind.MARK, 7), (Kind.MARK, 9)]
    assert lines(flow, "chosen") == []


def test_other_threads_are_not_followed(name: str) -> None:
    def program(_: FlowRecorder) -> None:
        thread = threading.Thread(target=chosen, args=(True,))
        thread.start()
        thread.join()

    assert lines(recorded(program, name), "chosen") == []


@pytest.mark.usefixtures("callbacks")
def test_the_newest_steps_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_CAPACITY", 64)
    flow = recorded(lambda _: [chosen(number % 2 == 0) for number in range(200)], name)
    assert len(flow.steps()) == 64 and flow.num_before > 1000
    assert set(lines(flow, "chosen")) == {
        (Kind.START, 0), (Kind.LINE, 1), (Kind.LINE, 2), (Kind.LINE, 3), (Kind.RETURN, 0)
    }  # fmt: skip


@needs_monitoring
@pytest.mark.usefixtures("callbacks")
def test_a_hot_loop_is_silenced_said_so_and_heard_again_a_second_later(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUDGET", 1000)
    monkeypatch.setattr(module, "_BUDGET_IN_PYTHON", 1000)

    def hot() -> None:
        for _ in range(50_000):
            pass

    def program(_: FlowRecorder) -> None:
        hot()
        time.sleep(1.1)
        chosen(True)
        hot()

    found = lines(recorded(program, name), "hot")
    assert 1000 < len(found) < 20_000  # of 200,000; a new second may begin in between
    silenced = [index for index, (kind, _) in enumerate(found) if kind is Kind.MARK]
    assert silenced and any(kind is Kind.LINE for kind, _ in found[silenced[0] + 3 :])


def test_the_ring_outlives_a_process_that_is_killed(name: str) -> None:
    program = (
        "import os, signal\n"
        "from tpcompile.recording.flow import FlowRecorder\n"
        "from tests.recording.test_flow import chosen\n"
        "recorder = FlowRecorder()\n"
        f"assert recorder.start({name!r}, by_settrace=True) == ''\n"
        "chosen(False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    flow = flow_left(name)
    assert flow is not None
    assert lines(flow, "chosen") == [(Kind.START, 0), (Kind.LINE, 1), (Kind.LINE, 3), (Kind.RETURN, 0)]


def test_a_forked_child_writes_nothing(name: str) -> None:
    def program(_: FlowRecorder) -> None:
        child = os.fork()
        if child == 0:
            chosen(True)
            os._exit(0)
        os.waitpid(child, 0)

    assert lines(recorded(program, name), "chosen") == []


def test_a_recording_that_ends_leaves_nothing(name: str) -> None:
    recorded(lambda _: chosen(True), name)
    assert flow_left(name) is None
    assert sys.gettrace() is None
    if IS_POSSIBLE:
        assert sys.monitoring.get_tool(3) is None


def test_a_debugger_is_not_replaced(name: str) -> None:
    if IS_POSSIBLE:
        sys.monitoring.use_tool_id(3, "a debugger")
    else:
        sys.settrace(lambda *_: None)
    try:
        why_not = FlowRecorder().start(name, by_settrace=True)
    finally:
        sys.settrace(None)
        if IS_POSSIBLE:
            sys.monitoring.free_tool_id(3)
    assert "debugger" in why_not


@pytest.mark.skipif(IS_POSSIBLE, reason="before Python 3.12")
def test_settrace_is_used_only_where_it_is_asked_for(name: str) -> None:
    assert "3.12" in FlowRecorder().start(name)
    assert sys.gettrace() is None


def test_without_room_for_the_ring_nothing_is_recorded_and_nothing_is_left(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file without room would end the process with SIGBUS at its first write."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left" in FlowRecorder().start(name, by_settrace=True)
    assert not ring._path(name).exists()
    assert FlowRecorder().start("", by_settrace=True)


@pytest.mark.parametrize("data", [b"", b"x" * 63, b"\xff" * 64, (5).to_bytes(8, "little") * 8, bytes(64)])
def test_a_file_that_is_no_ring_is_none(name: str, data: bytes) -> None:
    path = ring._path(name)
    path.write_bytes(data)
    assert flow_left(name) is None


def test_rings_of_jobs_that_were_killed_a_day_ago_are_removed(name: str) -> None:
    old = ring._path(secrets.token_hex(8))
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    recorded(lambda _: None, name)
    assert not old.exists()
    assert isinstance(old, Path)


@pytest.mark.usefixtures("callbacks")
def breaking(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    shown(y)
    return y * 2


def shown(y: torch.Tensor) -> None:
    print(f"{y.dtype}", flush=True)


@needs_monitoring
def test_what_dynamo_has_made_of_a_frame_is_no_step_and_what_it_calls_is(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(breaking, backend="eager")
    compiled(torch.ones(2))
    flow = recorded(lambda _: compiled(torch.ones(2)), name)
    functions = [code.function for code in flow.codes]
    assert "breaking" not in functions
    assert not [function for function in functions if "resume" in function]


def test_what_is_compiled_is_the_same_with_and_without(name: str) -> None:
    from torch._dynamo.utils import counters

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x.sin()
        return x * x.shape[0]

    def compiled() -> tuple[object, ...]:
        torch._dynamo.reset()
        counters.clear()
        graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
            graphs.append(graph.code)
            return graph.forward

        run = torch.compile(program, backend=backend)
        for size in (3, 3, 4, 5):
            run(torch.ones(size))
        return tuple(graphs), dict(counters["stats"]), dict(counters["graph_break"])

    plain = compiled()
    followed: list[tuple[object, ...]] = []
    recorded(lambda _: followed.append(compiled()), name)
    assert followed == [plain]
