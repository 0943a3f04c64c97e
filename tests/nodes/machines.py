"""Two nodes on one machine: network namespaces with a cable between them, each with a host name and folders of its own.

A process enters its node after the fork from the server of ranks, so that it need not import torch: network, host
name, /etc/hosts, /dev/shm and TMPDIR are those of the node. The clock is too, where a test sets it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tests import forked
from tpcompile.pytest_plugin.files import STREAMS, Files, Job, read_text
from tpcompile.pytest_plugin.session import Running

_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_REC_PRIVATE, _BIND = 0x4000 | 0x40000, 0x1000
_SUBNET = "10.77.0"
PORT = 29_500
"""Free on every node: its network is its own."""


def why_not() -> str:
    """Why no nodes can be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"tpc-{os.getpid()}"], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        _ip("netns", "del", f"tpc-{os.getpid()}")
    return made.stderr.strip()


@dataclass(frozen=True)
class Node:
    """One of the two."""

    name: str
    """Its host name."""
    namespace: str
    address: str
    folder: Path
    """What the node alone has: its output, temporary files, run directories."""

    def pids(self) -> list[int]:
        """Processes that run in it."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def cable(self, state: str) -> None:
        """Plug the cable in ("up") or pull it out ("down")."""
        _ip("-n", self.namespace, "link", "set", "cable", state)

    def slow_down(self, rate: str) -> str:
        """Let no more than `rate`, such as "200kbit", leave the node: what is more waits. Returns why it cannot."""
        bucket = ["tbf", "rate", rate, "burst", "1600", "latency", "20s"]
        command = ["tc", "-n", self.namespace, "qdisc", "add", "dev", "cable", "root", *bucket]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    def num_delayed(self) -> int:
        """Packets that have waited since then."""
        command = ["tc", "-n", self.namespace, "-s", "-j", "qdisc", "show", "dev", "cable"]
        (found,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return int(found["overlimits"])

    def enter(self) -> None:
        """Make this process, and those that it starts, run on the node."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as namespace:
            _check(libc.setns(namespace.fileno(), _NEWNET))
        _check(libc.unshare(_NEWNS | _NEWUTS))
        socket.sethostname(self.name)
        _check(libc.mount(b"none", b"/", None, _REC_PRIVATE, None))
        _check(libc.mount(bytes(self.folder / "hosts"), b"/etc/hosts", None, _BIND, None))
        _check(libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@dataclass
class Nodes:
    """Two nodes, and what runs on them."""

    a: Node
    b: Node
    _running: dict[str, Running] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Node]:
        return iter((self.a, self.b))

    def start(
        self,
        node: Node,
        command: Sequence[str | Path],
        environ: Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        """Start `python COMMAND` in the folder of a node, once per node; `fresh` in an interpreter of its own."""
        folder = node.folder / "job"
        folder.mkdir()
        variables = {
            **os.environ, "PYTHONPATH": forked.PYTHONPATH, "OMP_NUM_THREADS": "1", forked._JOB: str(folder),
            "TMPDIR": str(node.folder / "tmp"), "HOME": str(node.folder), **(environ or {}),
        }  # fmt: skip
        place = (node.namespace, node.name, str(node.folder))
        arguments = {"command": [str(word) for word in command], "node": place, "fresh": fresh}
        self._running[node.name] = forked.start(
            "tests.nodes.machines:play", folder, arguments, environ=variables, cwd=node.folder
        )

    def wait(self, timeout_s: float = 100.0) -> dict[str, forked.Ended]:
        """How the commands ended, by node; 124 for one that was killed at the limit."""
        ended = {}
        for name, running in self._running.items():
            running.is_served(timeout_s)
            (code,) = running.exit_codes()
            folder = self._node(name).folder / "job"
            if code is None:
                forked._ask_for_stacks(folder)
            running.close()
            left = forked._sweep(folder, running.pids)
            out, err = (read_text(Files(folder).output(0, stream)) for stream in STREAMS)
            ended[name] = forked.Ended(
                returncode=124 if code is None else code, stdout=out, stderr=err, left_running=left
            )
        return ended

    def stop_unasked(self) -> None:
        """Kill what no `wait` has asked for, as a test that fails before it leaves it."""
        for running in self._running.values():
            running.close()

    def output(self, name: str) -> str:
        """What the command on a node has printed so far; empty for one that has not opened its files yet."""
        folder = self._node(name).folder / "job"
        return "".join(read_text(Files(folder).output(0, stream)) for stream in STREAMS)

    def _node(self, name: str) -> Node:
        return self.a if name == self.a.name else self.b


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Nodes `node-a` and `node-b`, which are removed in the end; nothing may run in them then."""
    token = f"{os.getpid()}"
    hosts = "127.0.0.1 localhost\n" + "".join(f"{_SUBNET}.{n} node-{x}\n" for n, x in ((1, "a"), (2, "b")))
    with ExitStack() as stack:
        made = []
        for number, letter in ((1, "a"), (2, "b")):
            node = Node(f"node-{letter}", f"tpc-{token}-{letter}", f"{_SUBNET}.{number}", folder / f"node-{letter}")
            (node.folder / "tmp").mkdir(parents=True)
            (node.folder / "hosts").write_text(hosts)
            _ip("netns", "add", node.namespace)
            stack.callback(_ip, "netns", "del", node.namespace)
            made.append(node)
        a, b = made
        _ip("link", "add", "cable", "netns", a.namespace, "type", "veth", "peer", "name", "cable", "netns", b.namespace)
        for node in made:
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "cable")
            _ip("-n", node.namespace, "link", "set", "lo", "up")
            node.cable("up")
        nodes = Nodes(a, b)
        yield nodes
        nodes.stop_unasked()
        left = {node.name: node.pids() for node in made}
        assert left == {"node-a": [], "node-b": []}


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


# In the forked processes


def play(job: Job, rank: int, variables: Mapping[str, str]) -> NoReturn:
    """The command of a node."""
    namespace, name, folder = job.arguments["node"]
    Node(name, namespace, "", Path(folder)).enter()
    if job.arguments["fresh"]:
        os.execv(sys.executable, [sys.executable, *job.arguments["command"]])
    tempfile.tempdir = None  # that of the process that this one was forked from
    forked.play_job(job, rank, variables)
