"""Workers that are forked from a session: what they have of it, and what they have not."""

from __future__ import annotations

from pathlib import Path

from tests.pytest_plugin.session import run_session

SESSION = """
import atexit, os, pathlib, subprocess, sys

subprocess.Popen = next(of for of in subprocess.Popen.__mro__ if of.__module__ == "subprocess")  # no fork of forked.py
from tests import workers

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        sys.session, sys.popen, workers.is_of_session = os.getpid(), subprocess.Popen, True
        atexit.register(lambda: pathlib.Path(__file__).with_name(f"{os.getpid()} ended").touch())
        workers.fork_from(config)
"""
WORKERS = """
import atexit, os, pathlib, subprocess, sys
import pytest

HERE = pathlib.Path(__file__)

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    from tests import workers
    assert sys.session == os.getppid()
    assert subprocess.Popen is sys.popen
    assert not hasattr(workers, "is_of_session")
    atexit.register(HERE.with_name(f"{os.getppid()}.{os.environ['PYTEST_XDIST_WORKER']} ended").touch)
"""


def test_a_worker_has_what_the_session_imported_and_imports_this_package_itself(tmp_path: Path) -> None:
    found = run_session(tmp_path, {"conftest": SESSION, "of_workers": WORKERS}, "-n", "2", is_forked=True)
    assert found.returncode == 0, found.output
    assert len(found.cases) == 4
    (session,) = (path.name.removesuffix(" ended") for path in tmp_path.glob("* ended") if "." not in path.name)
    assert {path.name for path in tmp_path.glob("*.* ended")} == {f"{session}.gw0 ended", f"{session}.gw1 ended"}
