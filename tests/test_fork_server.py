"""One server of forks for several processes: the same for all that share it; it ends with the last of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.forked import ROOT

PROGRAM = """
import multiprocessing, os, sys
from pathlib import Path
from tests import fork_server
fork_server.PRELOADED = []
if sys.argv[1]:
    fork_server.share(Path(sys.argv[1]))
with multiprocessing.get_context("forkserver").Pool(1) as pool:
    print(pool.apply(os.getppid), flush=True)
sys.stdin.read()
"""


def start(folder: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


def server_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.parametrize("is_shared", [True, False])
def test_processes_that_share_a_folder_fork_from_one_server_which_outlives_the_first(
    is_shared: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path) if is_shared else ""
    first = start(folder)
    server = server_of(first)
    second = start(folder)
    assert (server_of(second) == server) is is_shared
    end(first)
    third = start(folder)
    assert (server_of(third) == server) is is_shared
    end(second)
    end(third)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(server)
