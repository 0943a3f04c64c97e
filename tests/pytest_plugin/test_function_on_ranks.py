"""`run_on_ranks` in sessions of a user: ranks come from the server, under xdist too; without it they are spawned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import ROOT
from tests.pytest_plugin.session import Session, run_session
from tpcompile.pytest_plugin.session import HAS_ENDED

pytestmark = pytest.mark.slow

FROM_THE_SERVER = """
import os, pathlib, psutil, pytest
import torch.distributed as dist
from tpcompile.testing import run_on_ranks

HERE = pathlib.Path(__file__).parent

def server():
    return psutil.Process(os.getppid()).ppid()

@pytest.mark.parametrize("number", range(4))
def test_names_its_server(number):
    for pid in run_on_ranks(server):
        (HERE / f"{os.environ['PYTEST_XDIST_WORKER']}.{pid}.server").touch()

def fails():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()

def test_one_rank_fails():
    run_on_ranks(fails)

def says():
    print("hello from", dist.get_rank())
    assert False

def test_output():
    run_on_ranks(says)
"""
WITHOUT_THE_SERVER = """
import os, psutil, pytest, time
from tpcompile.testing import run_on_ranks

def kills_the_server():
    os.kill(psutil.Process(os.getppid()).ppid(), 9)
    time.sleep(600)

def test_kills_the_server():
    run_on_ranks(kills_the_server)

def test_after_it():
    assert run_on_ranks(os.getppid, world_size=1) == [os.getpid()]
"""


def documented() -> str:
    """The example of docs/pytest.md."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/pytest.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "run_on_ranks" in block]
    return str(example)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("under_xdist")


@pytest.fixture(scope="module")
def under_xdist(folder: Path) -> Session:
    files = {"from_the_server": FROM_THE_SERVER, "documented": documented()}
    return run_session(folder, files, "-n", "2", is_forked=True)


@pytest.mark.usefixtures("under_xdist")
def test_under_xdist_the_calls_of_all_workers_fork_from_one_server(folder: Path) -> None:
    workers, servers, _ = zip(*(path.name.split(".") for path in folder.glob("*.server")), strict=True)
    assert set(workers) == {"gw0", "gw1"}
    assert len(set(servers)) == 1


def test_the_documented_call_passes(under_xdist: Session) -> None:
    names = re.findall(r"def (test_\w+)", documented())
    assert names
    assert not [name for name in names if under_xdist.cases[name].failures]


def test_a_rank_that_fails_is_the_failure_of_the_test_with_its_traceback(under_xdist: Session) -> None:
    (failure,) = under_xdist.cases["test_one_rank_fails"].failures
    assert failure.startswith("RuntimeError: rank 1")
    assert "ValueError: planted" in failure


def test_a_failure_comes_with_the_output_of_the_ranks(under_xdist: Session) -> None:
    output = under_xdist.cases["test_output"].output
    assert "[rank 0] hello from 0" in output and "[rank 1] hello from 1" in output


def test_a_server_that_is_killed_fails_the_call_that_runs_and_later_ranks_are_spawned(tmp_path: Path) -> None:
    done = run_session(tmp_path, {"without_the_server": WITHOUT_THE_SERVER}, is_forked=True)
    (failure,) = done.cases["test_kills_the_server"].failures
    assert re.match(f"RuntimeError: .*: {HAS_ENDED}", failure)
    assert not done.cases["test_after_it"].failures
    assert re.search(f"UserWarning: .*spawned.*: {HAS_ENDED}", done.output)


def test_a_session_that_cannot_fork_spawns_with_the_reason(tmp_path: Path) -> None:
    no_fork = 'from tpcompile.pytest_plugin import session\nsession._why_not = lambda: "this platform has no fork"'
    files = {"without_the_server": WITHOUT_THE_SERVER, "conftest": no_fork}
    done = run_session(tmp_path, files, "-k", "after_it", is_forked=True)
    assert not done.cases["test_after_it"].failures
    assert "no fork" in done.output
