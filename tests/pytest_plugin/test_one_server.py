"""The server of ranks: one for all workers of a session, gone with the session, and its own end is reported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.forked import PYTHONPATH
from tests.pytest_plugin.session import run_session
from tpcompile.pytest_plugin import session

pytestmark = pytest.mark.slow

NAMES_ITSELF = """
import os, pathlib, time, psutil, pytest

HERE = pathlib.Path(__file__).parent

def name_itself():
    server = psutil.Process(os.getppid()).ppid()
    (HERE / f"{os.environ.get('PYTEST_XDIST_WORKER')}.{server}.{os.getpid()}").touch()
    return server
"""
HANGS = f"""{NAMES_ITSELF}
@pytest.mark.tp(world_size=2)
@pytest.mark.parametrize("number", range(2))
def test_hangs(tp, number):
    name_itself()
    time.sleep(600)
"""
KILLS = f"""{NAMES_ITSELF}
@pytest.mark.tp(world_size=2)
def test_kills_the_server(tp):
    server = name_itself()
    time.sleep(1)  # both ranks have named themselves
    os.kill(server, 9)
    time.sleep(600)

@pytest.mark.tp(world_size=2)
def test_after_it(tp):
    pass
"""


def named(folder: Path) -> list[list[str]]:
    """Worker, server and process of each rank that ran."""
    return [path.name.split(".") for path in folder.glob("*.*.*") if path.name.rpartition(".")[2].isdigit()]


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def runs(pid: str) -> bool:
    """A zombie does not."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_session_that_is_killed_has_one_server_for_two_workers_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "pytest.ini").touch()
    options = ["-p", "tpcompile.pytest_plugin", "-n", "2", f"--basetemp={tmp_path / 'tmp'}"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env={**own, "PYTHONPATH": PYTHONPATH}
    ) as started:
        try:
            wait_until(lambda: len(named(tmp_path)) == 4, 200)
        finally:
            pytest_itself = psutil.Process(started.pid)
            for process in [pytest_itself, *pytest_itself.children(recursive=True)]:
                process.kill()
    workers, servers, ranks = (set(column) for column in zip(*named(tmp_path), strict=True))
    assert workers == {"gw0", "gw1"}
    assert len(servers) == 1
    wait_until(lambda: not any(map(runs, servers | ranks)), 60)


def test_a_server_that_is_killed_fails_its_tests_and_later_ones_are_not_checked(tmp_path: Path) -> None:
    done = run_session(tmp_path, {"kills": KILLS})
    (failure,) = done.cases["test_kills_the_server"].failures
    assert f"lost their server: {session.HAS_ENDED}" in failure.splitlines()[0]
    assert done.cases["test_after_it"].skipped == f"not checked: {session.HAS_ENDED}"
    assert not any(runs(rank) for _, _, rank in named(tmp_path))


def test_a_session_without_a_server_ends_at_once_and_its_name_is_free_again() -> None:
    held = session.Session()
    session.join(held.name).close()
    held.end()
    with pytest.raises(ConnectionRefusedError):
        session.join(held.name)
