"""Slurm itself on the two nodes: its controller on the first, a daemon on each, and a batch job to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import forked
from tests.nodes.machines import Node, Nodes

_START_S = 30.0
_COMMAND_S = 20.0
_STOP_S = 20.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
# A node has the CPUs that the tasks ask for, whatever this machine has; no cgroups, which a container may not make.
_SETTINGS = """
ClusterName=tests
SlurmctldHost=node-a
NodeName=node-a,node-b CPUs=2
PartitionName=all Nodes=ALL Default=YES
SlurmdParameters=config_overrides
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MailProg=/bin/true
"""


def why_no_slurm() -> str:
    """Why Slurm cannot be started here; empty where it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"Slurm is not installed: there is no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Cluster:
    """Slurm, running on both nodes; a folder that they share."""

    node: Node
    """Where commands are given."""
    folder: Path

    def output_of(self, command: Sequence[str | Path]) -> str:
        """What a command of Slurm prints on the first node."""
        done = subprocess.run(
            command,
            env=_environ(self.folder),
            preexec_fn=self.node.enter,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        return done.stdout + done.stderr

    def is_idle(self) -> bool:
        """True when both nodes wait for jobs."""
        return "idle 2" in self.output_of(["sinfo", "--noheader", "--format=%T %D"])

    def batch(
        self, script: Path, options: Sequence[str], arguments: Sequence[str], timeout_s: float
    ) -> tuple[int, str]:
        """Exit code and output of a batch job, submitted with `sbatch OPTIONS SCRIPT ARGUMENTS`."""
        output = self.folder / "output.txt"
        command = ["sbatch", "--parsable", f"--output={output}", *options, script, *arguments]
        number = self.output_of(command).split()[0]
        # Not `sbatch --wait`, which looks after 2, 12, 42 seconds.
        assert forked.became(lambda: self._job(number).get("JobState") in ("COMPLETED", "FAILED"), timeout_s)
        return int(self._job(number)["ExitCode"].split(":")[0]), output.read_text()

    def _job(self, number: str) -> dict[str, str]:
        shown = self.output_of(["scontrol", "show", "job", number])
        return dict(word.partition("=")[::2] for word in shown.split())


@contextmanager
def slurm_on(nodes: Nodes, folder: Path) -> Iterator[Cluster]:
    """Slurm on these nodes, until the end of the block."""
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(_SETTINGS.format(folder=folder))
    tool = folder / "tpcompile"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m tpcompile "$@"\n')
    tool.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = {"key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed", "log-file": "munge.log"}
    munge = [f"--{name}={folder / file}" for name, file in files.items()]
    with ExitStack() as stack:
        start = _Starter(stack, folder)
        start(nodes.a, ["munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *munge])
        assert forked.became((folder / "munge.socket").exists, _START_S)
        start(nodes.a, ["slurmctld", "-D"])
        for node in nodes:
            start(node, ["slurmd", "-D", "-N", node.name])
        cluster = Cluster(nodes.a, folder)
        assert forked.became(cluster.is_idle, _START_S), (folder / "slurmctld.log").read_text()
        yield cluster


@dataclass(frozen=True)
class _Starter:
    """Starts daemons, which end with the block."""

    stack: ExitStack
    folder: Path

    def __call__(self, node: Node, command: Sequence[str]) -> None:
        with (self.folder / f"{command[0]}-{node.name}.out").open("w") as output:
            daemon = subprocess.Popen(
                command, env=_environ(self.folder), preexec_fn=node.enter, stdout=output, stderr=output
            )
        self.stack.callback(_stop, daemon)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _environ(folder: Path) -> dict[str, str]:
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": forked.PYTHONPATH}
    return {**os.environ, **paths, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
