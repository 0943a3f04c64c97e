"""recording/early: a rank is recorded from the import of the sentinel on, so that its setup is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT
from tpcompile.evidence.timeline.flow import LINE_BITS, Kind
from tpcompile.private_folder import shared_folder
from tpcompile.recording import early, ring
from tpcompile.recording.flow import IS_POSSIBLE
from tpcompile.recording.ring import Ring

needs_monitoring = pytest.mark.skipif(not IS_POSSIBLE, reason="Python 3.12 has sys.monitoring")
RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
SET_UP = """
import os, sys
from tpcompile.sentinel import Sentinel
from tpcompile.evidence.timeline.flow import WATCHED
from tpcompile.recording import early
from tpcompile.recording.ring import flow_left

def set_up():
    return 4

def train():
    return 8

size = set_up()
child = os.fork()
if child == 0:
    print("in a child", len(early._RECORDERS), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
GOES_ON = """
name = f"early-test-{os.getpid()}"
recorder = early.recorder()
assert recorder.start(name) == ""
train()
flow = flow_left(name)
functions = [flow.codes[code].function for code, _ in flow.steps()]
print([functions.index(one) for one in ("set_up", WATCHED.function, "train")] == sorted(
    functions.index(one) for one in ("set_up", WATCHED.function, "train")))
recorder.stop()
print(len(early._RECORDERS))
early.begin()
print(early._RECORDERS[0]._ring.path)
"""
SPAWNED = """
import multiprocessing

def look(queue):
    early.begin()
    queue.put(len(early._RECORDERS))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=look, args=(queue,))
    worker.start()
    print("spawned", queue.get())
    worker.join()
"""
FOLLOWS = """
sys.path.insert(0, "{packages}")
import my_models
my_models.build()
name = f"early-test-{os.getpid()}"
recorder = early.recorder({follow})
assert recorder.start(name) == ""
my_models.build()
print([code.function for code in flow_left(name).codes].count("build"))
recorder.stop()
"""
WITHOUT_FLOW = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
with Sentinel(flow=False):
    print(len(early._RECORDERS), sys.monitoring.get_tool(3))
dist.destroy_process_group()
"""


def output(tmp_path: Path, then: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(SET_UP + then)
    environ = {**os.environ, **RANK, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@needs_monitoring
def test_the_setup_of_a_rank_is_known_before_its_watch_and_no_ring_is_left(tmp_path: Path) -> None:
    *said, ring_file = output(tmp_path, GOES_ON)
    assert said == ["in a child 0", "True", "0"]
    assert Path(ring_file).parent == shared_folder("rings") and not Path(ring_file).exists()


@needs_monitoring
@pytest.mark.parametrize(("follow", "times"), [((), "0"), (("my_models",), "1")])
def test_a_package_to_follow_is_followed_though_it_has_started(
    tmp_path: Path, follow: tuple[str, ...], times: str
) -> None:
    package = tmp_path / "site-packages" / "my_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def build():\n    return 1\n")
    then = FOLLOWS.replace("{packages}", str(package.parent)).replace("{follow}", repr(follow))
    assert output(tmp_path, then)[-1] == times


@needs_monitoring
def test_a_worker_that_a_rank_spawns_is_no_rank(tmp_path: Path) -> None:
    assert output(tmp_path, SPAWNED)[-1] == "spawned 0"


@needs_monitoring
def test_a_sentinel_without_flow_ends_it(tmp_path: Path) -> None:
    then = WITHOUT_FLOW.replace("{store}", str(tmp_path / "store"))
    assert output(tmp_path, then) == ["in a child 0", "0 None"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (RANK, True), ({}, False), ({**RANK, "WORLD_SIZE": "1"}, False), ({**RANK, "WORLD_SIZE": "two"}, False),
        ({"WORLD_SIZE": "2"}, False),
    ],
)  # fmt: skip
def test_one_of_several_ranks_is_told_by_its_variables(variables: dict[str, str], expected: bool) -> None:
    assert early.is_rank(variables) is expected


@pytest.mark.parametrize("num_later", [3, 40])
def test_the_first_steps_stay_known_however_many_come_later(
    name: str, num_later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_CAPACITY", 16)
    made = Ring(f"{name}-before")
    try:
        number = made.number_of("train.py", "main", 1)
        assert number == 0
        append(made, range(1, 11))
        made.go_on(name)
        append(made, range(11, 11 + num_later))
        flow = made.flow()
    finally:
        made.close()
    assert flow is not None and not made.path.exists()
    lines = [line for _, line in flow.steps()]
    if num_later == 3:
        assert (lines, flow.num_before, flow.setup) == (list(range(1, 14)), 0, "")
    else:
        assert (lines, flow.num_before) == (list(range(35, 51)), 34)
    assert [line for _, line in flow.of_setup().steps()][:10] == list(range(1, 11))


def append(made: Ring, lines: range) -> None:
    """As the callbacks do."""
    for line in lines:
        head = made.num_recorded
        at = ring.HEADER.size + head % 16 * ring.ENTRY.size
        ring.ENTRY.pack_into(made.map, at, 0, 0, Kind.LINE << LINE_BITS | line)
        made.map[:8] = (head + 1).to_bytes(8, "little")
