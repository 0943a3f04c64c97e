"""Groups, collectives, sends and receives of a process: its frames and the flight recorder, at the user's lines."""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.sentinel import flight
from tpcompile.sentinel.messages import PointToPoint
from tpcompile.testing import run_on_ranks
from tpcompile.torch_api import watching
from tpcompile.torch_api.point_to_point import Posted


def test_a_frame_between_two_lines_stands_at_the_first_line_of_its_function() -> None:
    code = compile("x = 1", "/app/train.py", "exec").replace(co_firstlineno=7, co_name="step")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    (line,) = flight.user_stack(frame)
    assert (line.file, line.line, line.function) == ("/app/train.py", 7, "step")


@pytest.mark.tp(world_size=2)
def test_the_flight_recorder_has_group_number_op_sizes_and_the_users_line() -> None:
    group = dist.new_group([0, 1], group_desc="second")
    dist.all_reduce(torch.ones(2, 3))
    dist.all_reduce(torch.ones(5), group=group)  # the line to be named
    names = tuple(watching.group_members())
    deadline = time.monotonic() + 20
    while not flight.recorded()[0].is_done and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread of torch's says so
    first, second = flight.recorded()
    assert (first.seq, first.op, first.sizes, first.is_done) == (1, "all_reduce", "2x3", True)
    assert {first.group, second.group} <= set(names)
    assert second.group.endswith("second")
    assert second.stack[0].code.endswith("# the line to be named")


@pytest.mark.tp(world_size=2)
def test_a_thread_in_a_collective_is_seen_as_blocked_at_the_users_line() -> None:
    """Rank 0 waits in a collective; a second thread looks at it."""
    found: list[str] = []
    main = threading.get_ident()

    def look() -> None:
        for _ in range(2000):
            frame = watching.main_thread_frame(main)
            if flight.is_blocked(frame):
                found.append(flight.user_stack(frame)[-1].code)
                break
            threading.Event().wait(0.005)
        store.set("looked", "yes")

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        thread = threading.Thread(target=look)
        thread.start()
        dist.all_reduce(torch.ones(3))  # waits here
        thread.join()
        assert found == ["dist.all_reduce(torch.ones(3))  # waits here"]
    else:
        store.wait(["looked"])
        dist.all_reduce(torch.ones(3))


def test_a_thread_in_the_users_own_code_is_not_blocked() -> None:
    assert not flight.is_blocked(sys._getframe())


def seen_while(call: Callable[[], Any], look: Callable[[Any], Any]) -> Any:
    """What `look` first says about the frame of this thread while it is in `call`, asked from a second thread."""
    found: list[Any] = []
    main, ended = threading.get_ident(), threading.Event()
    store = dist.distributed_c10d._get_default_store()

    def watch() -> None:
        while not found and not ended.wait(0.005):
            if said := look(watching.main_thread_frame(main)):
                found.append(said)
        store.set("looked", "yes")  # what lets the others come

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    ended.set()
    thread.join()
    return found[0] if found else None


def exchanged() -> dict[str, Any]:
    """Three ranks; rank 1 waits for rank 2 in calls of a group in which that is rank 1."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    pair = dist.new_group([1, 2], group_desc="pair")
    name = next((name for name in watching.group_members() if name.endswith(" pair")), "")
    x, found = torch.ones(3), {"name": name, "ranks": watching.group_members().get(name, ())}
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]] = {
        "recv": (lambda: dist.recv(x, src=2), lambda: dist.send(x, dst=1), watching.point_to_point),
        "recv of the pair": (
            lambda: dist.recv(x, group=pair, group_src=1),
            lambda: dist.send(x, group=pair, group_dst=0),
            watching.point_to_point,
        ),
        "send": (lambda: dist.send(x, dst=2), lambda: dist.recv(x, src=1), watching.point_to_point),
        "all_reduce of the pair": (
            lambda: dist.all_reduce(x, group=pair), lambda: dist.all_reduce(x, group=pair), watching.group_waited_in,
        ),
    }  # fmt: skip
    for what, (ours, theirs, look) in calls.items():
        if rank == 1:
            found[what] = seen_while(ours, look)
        elif rank == 2:
            store.wait(["looked"])
            store.delete_key("looked")
            theirs()
    everyone = watching.group_waited_in
    if rank == 1:
        found["barrier"] = seen_while(dist.barrier, everyone)
    else:
        store.wait(["looked"])
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def exchanges() -> list[dict[str, Any]]:
    return run_on_ranks(exchanged, world_size=3, collective_timeout_s=20)


@pytest.mark.parametrize(
    ("what", "says"), [("recv", ("recv", 2)), ("recv of the pair", ("recv", 2)), ("send", ("send", 2))]
)
def test_a_thread_in_a_send_or_receive_shows_the_global_rank_of_its_peer(
    exchanges: list[dict[str, Any]], what: str, says: tuple[str, int]
) -> None:
    assert exchanges[1][what] == says


def test_a_thread_in_a_collective_shows_its_group(exchanges: list[dict[str, Any]]) -> None:
    assert exchanges[1]["all_reduce of the pair"] == exchanges[1]["name"] != ""
    assert exchanges[1]["barrier"].endswith(" default_pg")


def test_a_group_is_found_by_the_name_the_recorder_gives_it(exchanges: list[dict[str, Any]]) -> None:
    assert [found["ranks"] for found in exchanges] == [(), (1, 2), (1, 2)]


def test_a_thread_in_the_users_own_code_sends_nothing_and_waits_in_no_group() -> None:
    assert watching.point_to_point(sys._getframe()) is None
    assert watching.group_waited_in(sys._getframe()) == ""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_function(x: Tensor, group: Any) -> Any:
    return funcol.all_reduce(x, "sum", group)


def by_op(x: Tensor, group: Any) -> Any:
    return torch.ops._c10d_functional.all_reduce.default(x, "sum", group.group_name)


def in_place(x: Tensor, group: Any) -> Any:
    return torch.ops._c10d_functional.all_reduce_(x, "sum", group.group_name)  # as generated code does


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("call", [by_function, by_op, in_place])
def test_a_functional_collective_shows_its_group_in_the_frame_that_issues_it(call: Any) -> None:
    group = dist.new_group([0], group_desc="named")
    told: set[str] = set()

    def at_each_call(frame: Any, event: str, _: Any) -> None:
        if event == "c_call":
            told.add(watching.group_waited_in(frame))

    sys.setprofile(at_each_call)
    try:
        issued = call(torch.ones(2), group)
    finally:
        sys.setprofile(None)
    torch.ops._c10d_functional.wait_tensor(issued)
    assert told - {""} == {name for name in watching.group_members() if name.endswith(" named")} != set()


@pytest.mark.parametrize(
    ("filename", "is_users"),
    [
        ("/scratch/cache/ab/cabc.py", False),
        ("/scratch/cache_of_mine/train.py", True),
        ("/tmp/torchinductor_me/ab/cabc.py", False),
        ("<eval_with_key>.7", False),
        ("/home/me/train.py", True),
    ],
)
def test_code_in_inductors_cache_is_not_the_users(
    filename: str, is_users: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/cache/")
    assert (flight.user_line(filename, 3, "call") is not None) == is_users


def test_no_file_is_in_a_cache_that_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    assert flight.user_line("/home/me/train.py", 3, "step") is not None


HERE = sys._getframe().f_lineno  # the line of the planted entry


def entry(name: str, **more: Any) -> dict[str, Any]:
    """A send or receive as NCCL's recorder writes it."""
    frames = [{"filename": __file__, "line": HERE, "name": "exchange"}]
    fields = {"is_p2p": True, "profiling_name": name, "state": "scheduled", "retired": False}
    return {**fields, "process_group": ("3", "mesh_pp"), "frames": frames} | more


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([entry("nccl:send 0->1")], ("send", 6)),
        ([entry("nccl:recv 0<-1", state="started")], ("recv", 6)),
        ([entry("nccl:send 0->1", state="completed"), entry("nccl:recv 1<-0")], ("recv", 4)),
        ([entry("nccl:send 0->1", process_group=("0", "default_pg"))], ("send", 1)),
        ([entry("nccl:send 0->1", state="completed")], None),
        ([entry("nccl:send 0->1", retired=True)], None),
        ([entry("nccl:all_reduce", is_p2p=False)], None),
    ],
)
def test_the_recorder_has_the_send_or_receive_in_flight_with_the_global_rank(
    entries: list[dict[str, Any]], says: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"3 mesh_pp": (4, 6)}  # a group that is not ours has no ranks, and its number stays
    monkeypatch.setattr(watching, "recorded_collectives", lambda: {"entries": entries})
    monkeypatch.setattr(watching, "group_members", lambda: groups)
    assert flight.point_to_point(sys._getframe()) is None  # the program goes on meanwhile
    found = flight.point_to_point(sys._getframe(), is_held=True)
    assert (found and (found.op, found.peer)) == says
    if found is not None:
        assert found.line is not None and found.line.code == linecache.getline(__file__, HERE).strip()


class Pending:
    """A handle that the program has not waited for."""

    def is_completed(self) -> bool:
        return False


def posted(op: Literal["send", "recv"], peer: int, line: int) -> Posted:
    stack = ((flow_code(), line),)
    return Posted(op=op, peer=peer, number=1, num_elements=1, dtypes="float32", at_ns=0, stack=stack, work=Pending())


def flow_code() -> CodeType:
    """That of the function below."""
    return test_of_several_messages_the_one_posted_where_the_program_waits_is_waited_for.__code__


def test_of_several_messages_the_one_posted_where_the_program_waits_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`dist.irecv(x, 0).wait()` after an isend that nobody has waited for; else the oldest one counts."""
    monkeypatch.setattr(watching, "waits_for_work", lambda frame: True)
    here, sent = sys._getframe(), posted("send", 2, HERE)
    lines = inspect.currentframe().f_lineno + 1, HERE  # type: ignore[union-attr]
    found = [flight.point_to_point(here, [sent, posted("recv", 1, line)], is_held=True) for line in lines]
    assert [(one.op, one.peer) for one in found if one is not None] == [("recv", 1), ("send", 2)]


BATCH, OTHER = ((dist.batch_isend_irecv.__code__, 1),), ((dist.batch_isend_irecv.__code__, 2),)


@pytest.mark.parametrize(
    ("more", "is_queued"),
    [
        ({}, True),
        ({"peer": 2}, False),
        ({"at_ns": 1}, False),
        ({"work": Pending()}, False),
        ({"stack": BATCH}, False),
        ({"stack": OTHER}, True),
    ],
    ids=["behind", "other peer", "before", "on a CPU", "same batch", "other batch"],
)
def test_a_message_behind_the_one_in_flight_on_its_stream_is_queued(more: dict[str, Any], is_queued: bool) -> None:
    fields: dict[str, Any] = {"peer": 1, "number": 1, "num_elements": 1, "dtypes": "float32", "stack": BATCH}
    held = Posted(op="recv", at_ns=2, **fields)
    sent = Posted(**{"op": "send", "at_ns": 3, **fields, "stack": OTHER, **more})
    found = flight.messages([held, sent], PointToPoint(op="recv", peer=1, number=1))
    assert [one.is_queued for one in found] == [False, is_queued]
