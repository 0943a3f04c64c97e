"""A pid means something on one machine and in one pid namespace only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tpcompile.ranks.liveness import process_state, this_host


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_process_of_this_host_is_alive_then_stopped_then_dead(sleeper: subprocess.Popen[bytes]) -> None:
    assert process_state(sleeper.pid, this_host()) == "alive"
    sleeper.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while process_state(sleeper.pid, this_host()) != "stopped" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(sleeper.pid, this_host()) == "stopped"
    sleeper.kill()
    while process_state(sleeper.pid, this_host()) != "dead" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(sleeper.pid, this_host()) == "dead"  # a zombie still
    sleeper.wait()
    assert process_state(sleeper.pid, this_host()) == "dead"


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="needs procfs")
def test_a_container_of_the_same_name_is_a_different_host(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    elsewhere = this_host().rpartition(" ")[0] + " 1"  # another pid namespace of this machine
    assert process_state(sleeper.pid, elsewhere) == "unknown"
    assert process_state(sleeper.pid, socket.gethostname()) == "unknown"
