"""The server of ranks: one for all workers of a session, gone with the session, and its own end is reported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.forked import PYTHONPATH, became, runs, start
from tests.pytest_plugin.session import run_session
from tpcompile.pytest_plugin import session
from tpcompile.pytest_plugin.files import Files
from tpcompile.pytest_plugin.session import Running

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
from tpcompile.testing import run_on_ranks

def hangs():
    name_itself()
    time.sleep(600)

@pytest.mark.tp(world_size=2)
def test_hangs(tp):
    hangs()

def test_hangs_in_a_function():
    run_on_ranks(hangs)
"""
ONE_HANGS = f"""{NAMES_ITSELF}
if "RANK" not in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    (HERE / os.environ["PYTEST_XDIST_WORKER"]).write_text(str(os.getpid()))

@pytest.mark.tp(world_size=2)
def test_hangs(tp):
    name_itself()
    time.sleep(600)

@pytest.mark.parametrize("number", range(8))
def test_of_the_other_worker(number):
    while not (HERE / "worker_is_killed").exists():
        time.sleep(0.05)

@pytest.mark.tp(world_size=2)
def test_on_ranks_afterwards(tp):
    while not (HERE / "worker_is_killed").exists():
        time.sleep(0.05)
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

IMPORTED = "import os\nIMPORTED_BY = os.getpid()"
NAMES_IMPORTERS = """
import os, pathlib, psutil, pytest
import conftest, own_plugin

@pytest.mark.tp(world_size=2)
def test_which_process_imports(tp):
    server = psutil.Process(os.getppid()).ppid()
    found = (own_plugin.IMPORTED_BY == server, conftest.IMPORTED_BY == os.getpid())
    pathlib.Path(__file__).with_name(f"importers_{tp.rank}").write_text(str(found))
"""


def named(folder: Path) -> list[list[str]]:
    """Worker, server and process of each rank that ran."""
    return [path.name.split(".") for path in folder.glob("*.*.*") if path.name.rpartition(".")[2].isdigit()]


def written(folder: Path, source: str, *options: str) -> tuple[list[str], dict[str, str]]:
    """The file of a session; arguments of Python and variables for it."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").touch()
    command = ["-m", "pytest", "-p", "tpcompile.pytest_plugin", f"--basetemp={folder / 'tmp'}", *options]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return command, {**own, "PYTHONPATH": PYTHONPATH}


@contextmanager
def started(folder: Path, source: str, *options: str) -> Iterator[None]:
    """A session of pytest as a user starts it, with a plugin of the user; it is killed with its workers."""
    (folder / "own_plugin.py").write_text(IMPORTED)
    (folder / "conftest.py").write_text(IMPORTED)
    (folder / "test_importers.py").write_text(NAMES_IMPORTERS)
    command, environ = written(folder, source, "-p", "own_plugin", *options)
    environ["PYTHONPATH"] += f"{os.pathsep}{folder}"
    with (folder / "output").open("w") as output:
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environ, stdout=output, stderr=output)
    try:
        yield
    finally:
        kill_with_children(process.pid)
        process.wait()


@contextmanager
def forked(folder: Path, source: str, *options: str) -> Iterator[Running]:
    """A session that is forked, with its workers and server."""
    command, environ = written(folder, source, *options)
    job = folder / "job"
    job.mkdir()
    with start("tests.forked:play_job", job, {"command": command}, environ=environ, cwd=folder) as running:
        yield running


def ended(running: Running, folder: Path, timeout_s: float) -> tuple[int | None, str]:
    """Exit code and output of such a session; None if it still runs then."""
    running.is_served(timeout_s)
    (code,) = running.exit_codes()
    return code, Files(folder / "job").output(0, "stdout").read_text()


def kill_with_children(pid: int) -> None:
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        each.kill()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a session that was killed while the tests of both of its workers hung on ranks."""
    folder = tmp_path_factory.mktemp("killed")
    with started(folder, HANGS, "-n", "2"):
        assert became(lambda: len(named(folder)) == 4, 200)
    return folder


def test_a_session_that_is_killed_has_one_server_for_two_workers_and_leaves_no_process(killed: Path) -> None:
    workers, servers, ranks = (set(column) for column in zip(*named(killed), strict=True))
    assert workers == {"gw0", "gw1"}
    assert len(servers) == 1
    assert became(lambda: not any(map(runs, servers | ranks)), 60)


@pytest.mark.parametrize("name", ["test_hangs", "test_hangs_in_a_function"])
def test_ctrl_c_leaves_no_rank_and_no_server(tmp_path: Path, name: str) -> None:
    with forked(tmp_path, HANGS, f"test_it.py::{name}") as running:
        assert became(lambda: len(named(tmp_path)) == 2, 200)
        _, servers, ranks = (set(column) for column in zip(*named(tmp_path), strict=True))
        assert all(map(runs, servers | ranks))
        os.kill(running.pids[0], signal.SIGINT)
        code, output = ended(running, tmp_path, 60)
        assert code == pytest.ExitCode.INTERRUPTED, output
        assert not any(map(runs, servers | ranks))


def test_a_worker_of_xdist_that_is_killed_has_its_ranks_stopped_and_the_other_tests_go_on(tmp_path: Path) -> None:
    with forked(tmp_path, ONE_HANGS, "-n", "2", "-v") as running:
        assert became(lambda: len(named(tmp_path)) == 2, 200)
        (worker,), (server,), ranks = (set(column) for column in zip(*named(tmp_path), strict=True))
        os.kill(int((tmp_path / worker).read_text()), signal.SIGKILL)
        assert became(lambda: not any(map(runs, ranks)), 60)
        assert runs(server)
        (tmp_path / "worker_is_killed").touch()
        code, output = ended(running, tmp_path, 200)
        assert re.search(rf"worker '{worker}' crashed .*test_hangs'", output), output
        assert code == pytest.ExitCode.TESTS_FAILED and "1 failed, 9 passed" in output
        assert not runs(server)


def test_a_server_that_is_killed_fails_its_tests_and_later_ones_are_not_checked(tmp_path: Path) -> None:
    done = run_session(tmp_path, {"kills": KILLS}, is_forked=True)
    (failure,) = done.cases["test_kills_the_server"].failures
    assert f" server: {session.HAS_ENDED}" in failure.splitlines()[0]
    assert done.cases["test_after_it"].skipped == f"not checked: {session.HAS_ENDED}"
    assert not any(runs(rank) for _, _, rank in named(tmp_path))


def test_plugins_of_pytest_are_imported_once_by_the_server_and_conftest_files_by_every_rank(killed: Path) -> None:
    found = {file.read_text() for file in killed.glob("importers_*")}
    assert found == {"(True, True)"}, (killed / "output").read_text()


def test_a_session_without_a_server_ends_at_once_and_leaves_no_file() -> None:
    held = session.Session()
    session.join(held.name).close()
    held.end()
    with pytest.raises(FileNotFoundError):
        session.join(held.name)
    assert not Path(held.name).exists()
